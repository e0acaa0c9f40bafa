"""PPO steps with other advantage estimators and with the engine's own log-probs.

Each scenario stands above the tests of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.ppo_runs import (
    TP2_PP2,
    Runs,
    Scenario,
    assert_close,
    assert_engine_and_trainer_agree,
    assert_same_on_every_layout,
)

EOS = 2

GRPO = ["algorithm.adv_estimator=grpo"]
GRPO_DEEP = Scenario("grpo, tp2 pp2", [*TP2_PP2, "rollout.tp=2", *GRPO])
GRPO_WIDE = Scenario("grpo, dp4", GRPO)


def test_grpo_is_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, GRPO_DEEP, GRPO_WIDE)


def test_group_relative_advantages_by_hand_and_without_a_critic(runs: Runs) -> None:
    for step in runs.steps(GRPO_WIDE):
        experience = step.experience
        assert experience.values is None
        of_critic = ("critic/vf", "critic/values", "timing_s/values")
        assert not any(name.startswith(of_critic) for name in step.metrics)

        totals = experience.token_rewards.double().sum(dim=1).view(-1, 2)
        mean = totals.mean(dim=1, keepdim=True)
        wanted = (totals - mean) / (totals.std(dim=1, keepdim=True) + 1e-6)
        mask = experience.rollout.response_mask
        assert_close(experience.advantages, torch.where(mask, wanted.reshape(-1, 1), 0.0))
        assert (step.actor_moved, step.critic_moved) == (True, False)


REMAX = Scenario("remax", ["algorithm.adv_estimator=remax", "algorithm.missing_eos_penalty=0.25"])


def test_remax_takes_off_what_the_greedy_answer_gets(runs: Runs) -> None:
    step = runs.steps(REMAX)[0]
    rollout = step.experience.rollout

    policy = runs.load()
    answers = [_greedy_answer(policy, prompt) for prompt in rollout.prompts.token_ids[::2]]
    baselines = []
    for tokens, reward in zip(answers, runs.rewards(answers), strict=True):
        baselines.append(reward - (0.0 if tokens[-1] == EOS else 0.25))

    to_come = step.experience.token_rewards.flip(1).cumsum(1).flip(1)
    baseline = torch.tensor(baselines).repeat_interleave(2)[:, None]
    wanted = torch.where(rollout.response_mask, to_come - baseline, 0.0)
    assert_close(step.experience.advantages, wanted)
    mean = sum(baselines) / 8
    assert step.metrics["critic/greedy_score/mean"] == pytest.approx(mean, abs=1e-5)


@torch.no_grad()
def _greedy_answer(policy: Any, prompt: list[int]) -> list[int]:
    """The prompt, and the likeliest tokens up to the end-of-sequence token, five at most."""
    tokens = list(prompt)
    for _ in range(5):
        tokens.append(int(policy(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == EOS:
            break
    return tokens


BYPASS = [
    "algorithm.rollout_correction={preset: bypass_pg_geo_rs_seq_tis, rollout_rs_threshold: 1.5}",
    "algorithm.rollout_correction.rollout_is_threshold=1.1",
]
BYPASS_DEEP = Scenario("bypass, tp2 pp2", [*TP2_PP2, *BYPASS])
BYPASS_WIDE = Scenario("bypass, dp4", BYPASS)
BYPASS_WARM_UP = Scenario("bypass, warm-up", ["trainer.critic_warmup=2", *BYPASS])


def test_bypass_is_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, BYPASS_DEEP, BYPASS_WIDE)


def test_bypass_takes_the_engines_log_probs_and_still_measures_the_mismatch(runs: Runs) -> None:
    for step in runs.steps(BYPASS_WIDE):
        experience = step.experience
        metrics = step.metrics
        assert torch.equal(experience.old_logprobs, experience.rollout.rollout_logprobs)
        assert "timing_s/old_log_prob" not in metrics
        assert metrics["actor/entropy"] > 1.0

        # The first of two mini-batches sees the policy that generated, the second one that has been
        # trained once.
        assert 0 < metrics["rollout_corr/k3_kl"] < 1e-2
        assert 1e-5 < metrics["training/rollout_probs_diff_max"] < 0.1
        assert 0.9 < metrics["rollout_corr/rollout_is_mean"] < 1.1
        assert 0.0 <= metrics["rollout_corr/rollout_rs_masked_fraction"] < 1.0


def test_bypass_measures_the_mismatch_also_while_the_critic_warms_up(runs: Runs) -> None:
    one, two = (step.metrics for step in runs.steps(BYPASS_WARM_UP))
    for metrics in (one, two):
        assert abs(metrics["rollout_corr/kl"]) < 0.1
        assert metrics["training/rollout_probs_diff_max"] < 0.1
        assert metrics["actor/entropy"] > 1.0
    assert "timing_s/old_log_prob" in one and "timing_s/old_log_prob" not in two


def test_the_engine_and_the_trainer_agree(runs: Runs) -> None:
    # With a bypass the difference is measured while the policy is trained.
    assert_engine_and_trainer_agree(runs, without=[BYPASS_DEEP, BYPASS_WIDE, BYPASS_WARM_UP])
