"""Each table of functions or traits has exactly the names that the configuration accepts for it.

A `Literal` has to be written out for the type checker. So its names cannot be taken from a table,
and a test compares the two.
"""

import re
import subprocess
import sys
from typing import get_args

import pytest
import torch

from mrlhf.config import PPOConfig
from mrlhf.config.correction import CorrectionPreset
from mrlhf.config.tree import nodes
from mrlhf.rewards.combine import EXTERNAL_TERMS
from mrlhf.rewards.rules import RULES
from mrlhf.rl import names
from mrlhf.rl.advantages import ADVANTAGE_ESTIMATORS
from mrlhf.rl.correction import Correction, Criterion, correct
from mrlhf.rl.kl import KlController, kl_penalty
from mrlhf.rl.losses import aggregation_count
from mrlhf.rl.policy_losses import POLICY_LOSSES
from mrlhf.rl.preference import PAIR_LOSSES
from tests.pages import ROOT
from tests.unit.configurations import ppo


def test_tables_have_the_names_of_their_literals():
    estimators = set(get_args(names.AdvantageEstimator))
    assert set(ADVANTAGE_ESTIMATORS) == set(names.ESTIMATOR_TRAITS) == estimators
    losses = set(get_args(names.PolicyLossName))
    assert set(POLICY_LOSSES) == set(names.POLICY_LOSS_TRAITS) == losses
    assert set(PAIR_LOSSES) == set(get_args(names.PairLossName))
    assert set(RULES) == set(get_args(names.RewardRule))
    assert {*RULES, *EXTERNAL_TERMS} == set(get_args(names.RewardName))


def test_correctness_terms_are_rules():
    assert set(names.CORRECTNESS_TERMS) <= set(RULES)


def test_a_users_function_is_given_every_number_that_it_can_use():
    config = ppo(algorithm__adv_estimator="my.py:f", actor__policy_loss__loss_mode="my.py:g")
    starts = ("actor.clip_ratio_", "actor.tau", "actor.policy_loss.", "algorithm.gdpo")
    own = {key for key in nodes(PPOConfig) if key.startswith(starts) and not config.reads(key)}
    choosing_tokens = {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio"}
    assert own == {f"actor.policy_loss.{key}" for key in choosing_tokens}
    for key in ("use_critic", "gamma", "lam", "f_norm", "norm_adv_by_std_in_grpo"):
        assert config.reads(f"algorithm.{key}")


def test_every_name_of_a_number_computes_one():
    drawn = torch.tensor([[-1.0, -2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for kind in get_args(names.KlKind):
        if kind != "full":
            assert kl_penalty(drawn, drawn - 1, kind).shape == drawn.shape
    for kind in get_args(names.KlControllerKind):
        assert KlController(kind, 0.1, 0.1, 10).value == 0.1
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


@pytest.mark.parametrize(
    ("section", "choice"),
    [
        ("Advantage estimators", names.AdvantageEstimator),
        ("Policy losses", names.LossMode),
        ("Loss aggregation", names.LossAggMode),
        ("KL to the reference", names.KlKind),
        ("Rollout correction", CorrectionPreset),
    ],
)
def test_the_page_of_methods_has_one_row_for_each_name(section, choice):
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    text = page.split(f"\n## {section}")[1].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in text.split("\n") if line.startswith("| ")]
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    for name in get_args(choice):
        assert named.count(name) == 1, (
            f"{name} needs one row in the section {section!r} of docs/algorithms.md"
        )
    assert set(named) <= {*get_args(choice), "reinforce"}


def test_the_configuration_offers_every_name():
    for name in get_args(names.LossMode):
        assert ppo(actor__policy_loss__loss_mode=name).actor.policy_loss.loss_mode == name
    for name in get_args(names.AdvantageEstimator):
        assert ppo(algorithm__adv_estimator=name).algorithm.adv_estimator == name


def test_names_need_no_torch():
    # The package itself imports torch, so the file is run alone.
    check = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check, names.__file__], check=True)
