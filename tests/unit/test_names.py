"""Each table of functions has exactly the names that the configuration accepts for it."""

import subprocess
import sys
from typing import get_args

import torch

from mrlhf.rewards.combine import EXTERNAL_TERMS
from mrlhf.rewards.rules import RULES
from mrlhf.rl import names
from mrlhf.rl.advantages import ADVANTAGE_ESTIMATORS
from mrlhf.rl.correction import Correction, Criterion, correct
from mrlhf.rl.kl import kl_penalty, make_kl_controller
from mrlhf.rl.losses import aggregation_count
from mrlhf.rl.policy_losses import POLICY_LOSSES
from tests.unit.configurations import ppo


def test_tables_have_the_names_of_their_literals():
    assert tuple(ADVANTAGE_ESTIMATORS) == get_args(names.AdvantageEstimator)
    assert tuple(POLICY_LOSSES) == get_args(names.PolicyLossName)
    assert tuple(RULES) == get_args(names.RewardRule)
    assert {*RULES, *EXTERNAL_TERMS} == set(get_args(names.RewardName))


def test_sets_of_names_hold_known_names():
    estimators = set(get_args(names.AdvantageEstimator))
    losses = set(get_args(names.LossMode))
    assert {*names.WHITENED, *names.DISCOUNTED, *names.COMPARES_ANSWERS} <= estimators
    assert losses >= names.SEQUENCE_LEVEL | names.COVARIANCE | set(names.CLIPPED)
    assert set(names.CORRECTNESS_TERMS) <= set(RULES)


def test_every_name_of_a_number_computes_one():
    drawn = torch.tensor([[-1.0, -2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for kind in get_args(names.KlKind):
        if kind != "full":
            assert kl_penalty(drawn, drawn - 1, kind).shape == drawn.shape
    for kind in get_args(names.KlControllerKind):
        assert make_kl_controller(kind, 0.1, 0.1, 10).value == 0.1
    for mode in get_args(names.LossAggMode):
        assert aggregation_count(6, 3, mode) in (1, 3, 6)
    for statistic in get_args(names.Statistic):
        criterion = Criterion(statistic, 0.5 if statistic.endswith("k1") else None, 2.0)
        correction = Correction(None, None, 1.0, False, (criterion,))
        assert correct(torch.zeros(1, 2), mask, correction).kept.all()


def test_the_reward_and_the_loss_share_their_kinds_of_kl():
    plain = {kind for kind in get_args(names.KlKind) if not kind.endswith("+")}
    assert set(get_args(names.RewardKlKind)) == plain
    # `reinforce` is chosen by algorithm.rollout_correction.loss_type.
    assert set(get_args(names.PolicyLossName)) - set(get_args(names.LossMode)) == {"reinforce"}
    assert "reinforce" in get_args(names.BypassLoss)


def test_the_configuration_offers_every_name():
    for name in get_args(names.LossMode):
        assert ppo(actor__policy_loss__loss_mode=name).actor.policy_loss.loss_mode == name
    for name in get_args(names.AdvantageEstimator):
        assert ppo(algorithm__adv_estimator=name).algorithm.adv_estimator == name


def test_names_need_no_torch():
    # The package itself imports torch, so the file is run alone.
    check = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check, names.__file__], check=True)
