"""Truncated sampling in whole steps: trainer and engine agree on what could be drawn, everywhere.

The engine draws with top-p, top-k or both; the trainer's log-probabilities, among the tokens that
could be drawn, are the engine's on every layout, for any method, and for tokens of older versions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.parallel.vocab import _Projection
from tests.dist.ppo_runs import (
    DP4,
    TP2_PP2,
    Runs,
    Scenario,
    assert_engine_and_trainer_agree,
    assert_same_on_every_layout,
)
from tests.oracle import plain_models

VOCABULARY = plain_models.SIZES["vocab_size"]
P = ["rollout.top_p=0.7"]
K = ["rollout.top_k=2"]  # fewer words than a bit for each token takes
BOTH = ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05"]

P_DEEP = Scenario("p, tp2 pp2", [*P, *TP2_PP2, "rollout.tp=2"])
P_WIDE = Scenario("p, dp4", [*P, *DP4])
K_TP4 = Scenario("k, tp4", [*K, "actor.tp=4", "rollout.tp=4"])
K_WIDE = Scenario("k, dp4", [*K, *DP4])
_GRPO = [
    *BOTH,
    "algorithm.adv_estimator=grpo",
    "critic=null",
    "algorithm.use_kl_in_reward=false",
    "algorithm.rollout_correction.rollout_is=token",
]
BOTH_LONG = Scenario("both, cp2", [*_GRPO, "actor.cp=2", "actor.share_prompts=true"])
BOTH_WIDE = Scenario("both, dp4", [*_GRPO, "reward_model.tp=4"])
ADAPTED = Scenario("adapters, tp2", [*BOTH, "actor.tp=2", "actor.lora.rank=4", "rollout.tp=2"])
# Its only pass is the update, which must not have begun to train when it measures.
BYPASS = Scenario(
    "bypass, tp2",
    [
        *P,
        "actor.tp=2",
        "algorithm.rollout_correction.bypass_mode=true",
        "actor.ppo_mini_batch_size=8",
        "actor.ppo_epochs=1",
    ],
)
_LEADS = [
    *BOTH,
    "reward.terms=[{name: environment}, {name: exact_match}]",
    "reward_model=null",
    "data.max_prompt_length=10",
    "algorithm.use_kl_in_reward=false",
]
FUNCTION = Scenario(
    "function",
    [
        *_LEADS,
        "rollout.environment=ROOT/episodes.py:shared",
        "data.chat_template=ROOT/chat.jinja",
        "data.max_response_length=10",
        "actor.tp=2",
        "actor.micro_batch_tokens=24",
    ],
)
_TURNS = [
    *_LEADS,
    "rollout.environment=ROOT/episodes.py:Asks",
    "rollout.max_turn_tokens=4",
    "rollout.on_rewrite=split",
    "data.chat_template=ROOT/forgets.jinja",
    "rollout.stop_token_ids=[4,5,6,7,8,9,10,11,12,13,14,15]",
    "data.max_response_length=24",
    "rollout.partial={over: 1.75, max_versions: 3, turn_cost: 2}",
]
TURNS_DEEP = Scenario("turns, tp2 pp2", [*_TURNS, *TP2_PP2, "rollout.tp=2"])
TURNS_WIDE = Scenario("turns, dp4", [*_TURNS, "critic.pp=2"])


_CENTRED = [
    *_TURNS,
    *("rollout.top_p=1", "rollout.top_k=-1", "rollout.min_p=0"),
    "algorithm.rollout_correction.preset=bypass_pg_token_tis_sc",
    "rollout.topk_log_probs=7",
]
CENTRED_LONG = Scenario("centred, cp2", [*_CENTRED, "actor.cp=2", "rollout.tp=2"])
CENTRED_WIDE = Scenario("centred, dp4", [*_CENTRED, "critic.pp=2"])


def _forget_masks(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The trainer takes the whole vocabulary for what could be drawn."""
    patch.setattr(_Projection, "_mask", lambda *_: None)


OFF = Scenario("without replay", [*P, *DP4], _forget_masks)

AT_ONCE = (P_DEEP, P_WIDE, K_TP4, K_WIDE, BOTH_LONG, BOTH_WIDE, ADAPTED, BYPASS, FUNCTION)


def _could_be_drawn(rollout: Rollout) -> Tensor:
    """What the masks say, bool [batch, response_len, vocab]."""
    assert rollout.masks is not None
    every = rollout.masks.by_place()
    excluded = every.excluded(range(VOCABULARY), VOCABULARY, torch.device("cpu"))
    return ~excluded.view(*rollout.shape, VOCABULARY)


def test_the_engine_and_the_trainer_agree(runs: Runs) -> None:
    several_versions = (TURNS_DEEP, TURNS_WIDE, CENTRED_LONG, CENTRED_WIDE)
    assert_engine_and_trainer_agree(runs, without=(*several_versions, OFF))
    for scenario in AT_ONCE:
        for step in runs.steps(scenario):
            rollout = step.experience.rollout
            apart = (step.experience.old_logprobs - rollout.rollout_logprobs).abs()
            assert apart[rollout.loss_mask].max() < 1e-5, scenario.name
    for scenario in several_versions:
        for step in runs.steps(scenario):
            assert step.metrics["training/rollout_probs_diff_max"] < 1e-5, scenario.name


def test_what_was_drawn_could_be_drawn(runs: Runs) -> None:
    for scenario in (*AT_ONCE, TURNS_DEEP, TURNS_WIDE):
        for step in runs.steps(scenario):
            rollout = step.experience.rollout
            could = _could_be_drawn(rollout)
            drawn = rollout.loss_mask
            assert could.gather(2, rollout.response_ids.long()[:, :, None])[drawn].all()
            sizes = could.sum(dim=2)
            assert (sizes[~drawn] == VOCABULARY).all(), "a token without a mask"
            assert (sizes[drawn] < VOCABULARY).all()
            if scenario in (K_TP4, K_WIDE):
                assert (sizes[drawn] == 2).all()
            else:
                assert len(sizes[drawn].unique()) > 3

    _, second = runs.steps(TURNS_WIDE)
    assert len(second.experience.rollout.versions.unique()) == 3  # none, 0 and 1


def test_the_engines_likeliest_tokens_are_the_trainers(runs: Runs) -> None:
    """Recorded of every drawn token, also of an older version; and the drawn one is among them."""
    _, step = runs.steps(CENTRED_LONG)
    rollout = step.experience.rollout
    assert rollout.masks is not None and rollout.masks.head == 7
    ids, logprobs = rollout.masks.by_place().heads(torch.device("cpu"))
    drawn = rollout.loss_mask.flatten()
    assert ((logprobs[:, 0] > -torch.inf) == drawn).all()
    masses = logprobs[drawn].exp().sum(dim=1)
    assert masses.max() < 1 + 1e-6 and masses.min() < 0.98

    own = ids == rollout.response_ids.flatten()[:, None]
    own &= drawn[:, None] & (logprobs > -torch.inf)
    rows = own.any(dim=1)
    assert rows.sum() > 0.5 * drawn.sum()
    of_drawn = rollout.rollout_logprobs.flatten()[rows]
    torch.testing.assert_close(logprobs[own], of_drawn, rtol=0, atol=1e-6)
    metric = step.metrics["actor/sc_sampler_head_mass"]
    assert metric == pytest.approx(masses.mean().item(), abs=0.02)
    assert step.metrics["actor/sc_correction"] != 0
    assert len(rollout.versions.unique()) == 3  # none, 0 and 1


def test_steps_are_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, P_WIDE, P_DEEP)
    assert_same_on_every_layout(runs, K_WIDE, K_TP4)
    assert_same_on_every_layout(runs, BOTH_WIDE, BOTH_LONG)
    assert_same_on_every_layout(runs, TURNS_WIDE, TURNS_DEEP)
    assert_same_on_every_layout(runs, CENTRED_WIDE, CENTRED_LONG)


def test_a_trainer_without_masks_is_seen(runs: Runs) -> None:
    assert runs.steps(OFF)[0].responses == runs.steps(P_WIDE)[0].responses
    for step in runs.steps(OFF):
        assert step.metrics["training/rollout_probs_diff_max"] > 0.05
