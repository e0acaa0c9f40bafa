"""The names of algorithms that the configuration repeats, because it imports no torch, are those of
the code.
"""

from typing import get_args

from mrlhf.config import algorithm, correction, sections
from mrlhf.preflight import method_checks
from mrlhf.rewards.combine import EXTERNAL_TERMS
from mrlhf.rewards.rules import RULES
from mrlhf.rl import advantages, kl, losses, policy_losses, shaping
from mrlhf.rl import correction as rl_correction
from mrlhf.rollout import scoring


def test_names_of_algorithms_are_those_of_the_code():
    assert set(get_args(algorithm.AdvEstimator)) == set(get_args(advantages.AdvantageEstimator))
    assert get_args(algorithm.KlPlacement) == get_args(shaping.KlPlacement)
    assert get_args(algorithm.KlControl) == get_args(kl.KlControllerKind)
    assert set(get_args(algorithm.KlPenalty)) == {
        kind for kind in get_args(kl.KlKind) if not kind.endswith("+")
    }
    assert set(get_args(sections.KlLoss)) == set(get_args(kl.KlKind))
    assert set(get_args(sections.LossAggMode)) == set(get_args(losses.LossAggMode))
    assert set(get_args(sections.RewardName)) == {*RULES, *EXTERNAL_TERMS}
    assert method_checks.CORRECTNESS_TERMS == scoring.CORRECTNESS_TERMS


def test_names_of_policy_losses_are_those_of_the_code():
    # rollout_correction.loss_type chooses the last one
    assert {*get_args(sections.PolicyLossName), "reinforce"} == set(
        get_args(policy_losses.PolicyLossName)
    )
    assert sections.SEQUENCE_LEVEL == policy_losses.SEQUENCE_LEVEL
    assert sections.COVARIANCE == policy_losses.COVARIANCE


def test_names_of_corrections_are_those_of_the_code():
    assert set(get_args(correction.Statistic)) == set(get_args(rl_correction.Statistic))
    assert set(get_args(correction.WeightLevel)) == set(get_args(rl_correction.WeightLevel))
