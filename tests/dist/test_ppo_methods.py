"""PPO steps with other advantage estimators and with the engine's own log-probs.

Each scenario stands above the tests of it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mrlhf.batch import Sequences
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.rl import advantages
from mrlhf.rl.token_baselines import TokenProbabilities, optimal_token_baseline
from mrlhf.roles.reward_model import RewardModel
from tests.dist.ppo_runs import (
    DP4,
    MODEL,
    REWARD_MODEL,
    REWARD_WEIGHT,
    TP2_PP2,
    Runs,
    Scenario,
    assert_close,
    assert_engine_and_trainer_agree,
    assert_same_on_every_layout,
)
from tests.oracle import plain_tables

ENSEMBLE = [
    f"reward_model.ensemble=[ROOT/{MODEL}-critic]",
    "reward_model.combine=min",
    "reward_model.offload=[params]",
]
ENSEMBLE_DEEP = Scenario("ensemble, tp2 pp2", [*TP2_PP2, "reward_model.tp=2", *ENSEMBLE])
ENSEMBLE_WIDE = Scenario("ensemble, dp4", [*DP4, *ENSEMBLE])


def test_an_ensemble_gives_the_lowest_score_of_its_members_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, ENSEMBLE_DEEP, ENSEMBLE_WIDE)
    step = runs.steps(ENSEMBLE_DEEP)[0]
    sequences = step.experience.rollout.sequences()
    each = torch.tensor([runs.rewards(sequences), runs.rewards(sequences, f"{MODEL}-critic")])
    assert (each[0] > each[1]).unique().numel() == 2  # each is the lowest somewhere
    assert_close(step.experience.scores, each.amin(0))
    spread = float((each[0] - each[1]).abs().mean()) / 2 / REWARD_WEIGHT
    assert step.metrics["reward/reward_model/std"] == pytest.approx(spread, abs=1e-5)


def _no_shift_on_one_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    right = RewardModel._means_of_references

    def wrong(model: RewardModel) -> list[float]:
        return [mean * (rank != 1) for mean in right(model)]

    patch.setattr(RewardModel, "_means_of_references", wrong)


SHIFT = [*ENSEMBLE, "reward_model.normalise=reference"]
SHIFT_DEEP = Scenario("shift, tp2 pp2", [*TP2_PP2, "reward_model.tp=2", *SHIFT])
SHIFT_WIDE = Scenario("shift, dp4", [*DP4, *SHIFT, "reward_model.cp=2", "reward_model.tp=1"])
SHIFT_LOST = Scenario("shift lost, dp4", [*DP4, *SHIFT], _no_shift_on_one_rank)


def test_the_reference_answers_of_the_data_have_the_mean_score_0(runs: Runs) -> None:
    assert_same_on_every_layout(runs, SHIFT_DEEP, SHIFT_WIDE)
    tokenizer = load_tokenizer(runs.root / "data" / "tokenizer")
    answered = []
    for line in (runs.root / "data" / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = tokenizer.encode(row["prompt"]) + tokenizer.encode(row["answer"]) + [EOS]
        answered.append(torch.tensor(ids))

    for step in runs.steps(SHIFT_DEEP):
        sequences = step.experience.rollout.sequences()
        each = []
        for name in (REWARD_MODEL, f"{MODEL}-critic"):
            of_answers = torch.tensor(runs.rewards(answered, name))
            assert abs(of_answers.mean()) > 0.01 and of_answers.std() > 0.01
            each.append(torch.tensor(runs.rewards(sequences, name)) - of_answers.mean())
        assert_close(step.experience.scores, torch.stack(each).amin(0))
    with pytest.raises(AssertionError, match="scores"):
        assert_same_on_every_layout(runs, SHIFT_DEEP, SHIFT_LOST)


EOS = 2
TOKENS = 18  # of the tokenizer; the model has more, which are never drawn

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


TOKEN_BASELINE = [
    "algorithm.adv_estimator=optimal_token_baseline",
    "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 0.5_2.0, "
    "rollout_is_batch_normalize: true, rollout_rs: 'token_k2,seq_mean_k1', "
    "rollout_rs_threshold: '0.1,2.0'}",
]
TOKEN_BASELINE_DEEP = Scenario("token baseline, tp2 pp2", [*TP2_PP2, *TOKEN_BASELINE])
TOKEN_BASELINE_WIDE = Scenario("token baseline, dp4", TOKEN_BASELINE)


def test_a_baseline_for_each_token_is_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, TOKEN_BASELINE_DEEP, TOKEN_BASELINE_WIDE)


def test_a_baseline_for_each_token_sees_the_whole_distribution(runs: Runs) -> None:
    step = runs.steps(TOKEN_BASELINE_DEEP)[0]
    experience = step.experience
    rollout = experience.rollout
    policy = runs.load()
    logprobs, _ = plain_tables.evaluate(policy, rollout)
    squares = plain_tables.sum_of_squares(policy, rollout)
    wanted, _ = optimal_token_baseline(
        experience.token_rewards,
        rollout.response_mask,
        rollout.prompt_groups,
        TokenProbabilities(logprobs, squares, experience.weights),
    )
    assert_close(experience.advantages, wanted)
    assert experience.values is None


def test_every_metric_of_the_correction_is_measured(runs: Runs) -> None:
    metrics = runs.steps(TOKEN_BASELINE_WIDE)[0].metrics
    nearly_one = ("rollout_is_mean", "rollout_is_seq_max", "rollout_is_batch_norm_factor")
    for name in nearly_one:
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(1.0, abs=1e-4), name

    nothing = (
        "rollout_is_oob_ratio",
        "rollout_rs_token_k2_masked_fraction",
        "rollout_rs_seq_mean_k1_seq_fraction_low",
    )
    for name in nothing:
        assert metrics[f"rollout_corr/{name}"] == 0.0, name

    assert metrics["rollout_corr/training_log_ppl"] == pytest.approx(
        metrics["rollout_corr/rollout_log_ppl"], abs=1e-4
    )
    assert metrics["training/rollout_probs_diff_valid"] == 1.0
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.99999
    assert metrics["response/aborted_ratio"] == 0.0
    assert metrics["response_length_non_aborted/mean"] == metrics["response_length/mean"]


WITHOUT_KL = [
    "algorithm.use_kl_in_reward=false",
    "algorithm.kl_ctrl={type: fixed, kl_coef: 0.001, target_kl: 0.1, horizon: 10000}",
]
GDPO = Scenario("gdpo", [*WITHOUT_KL, "algorithm.adv_estimator=gdpo"])


def test_gdpo_compares_each_term_by_itself(runs: Runs) -> None:
    step = runs.steps(GDPO)[0]
    samples = runs.dumped(GDPO, 1)
    weights = {"exact_match": 1.0, "reward_model": REWARD_WEIGHT}

    summed = torch.zeros(8, 2, dtype=torch.float64)
    for term, weight in weights.items():
        scores = torch.tensor([sample["terms"][term] for sample in samples], dtype=torch.float64)
        assert step.metrics[f"gdpo/{term}/mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
        pairs = scores.view(-1, 2)
        gaps = pairs - pairs.mean(dim=1, keepdim=True)
        summed += weight * gaps / (pairs.std(dim=1, keepdim=True) + 1e-6)

    mask = step.experience.rollout.response_mask
    table = torch.where(mask, summed.reshape(-1, 1), 0.0)
    wanted = (table - table[mask].mean()) / table[mask].std()
    torch.testing.assert_close(
        step.experience.advantages[mask].double(), wanted[mask], rtol=0, atol=2e-4
    )


ONLINE = [
    *WITHOUT_KL,
    "actor.use_kl_loss=false",
    "actor.kl_loss_coef=0.001",
    "algorithm.adv_estimator=online_dpo",
    "algorithm.pair_beta=0.5",
    "actor.policy_loss.loss_mode=gpg",
    "actor.loss_agg_mode=seq-mean-token-sum",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_epochs=1",
    "rollout.n=3",
]
ONLINE_WIDE = Scenario("online dpo, dp4", ONLINE)
ONLINE_DEEP = Scenario("online dpo, tp2 pp2", [*TP2_PP2, "rollout.tp=2", *ONLINE])
_IPO = [*ONLINE, "algorithm.pair_loss=ipo"]
ONLINE_LONG = Scenario("online ipo, cp2", ["actor.cp=2", "actor.share_prompts=true", *_IPO])


def _prefer_other_rows(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The advantages of drawn pairs are those of the rows before."""
    right = advantages.online_dpo
    patch.setattr(
        advantages, "online_dpo", lambda *given: tuple(x.roll(1, 0) for x in right(*given))
    )


ONLINE_OFF = Scenario("online dpo, other rows", ONLINE, _prefer_other_rows)


def test_pairs_that_the_policy_draws_are_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, ONLINE_WIDE, ONLINE_DEEP)


def _assert_gradient_of_pairs(runs: Runs, scenario: Scenario) -> None:
    """The norm of the gradient is that of the pairs' loss with transformers."""
    step = runs.steps(scenario)[0]
    rollout = step.experience.rollout
    policy = runs.load()
    ref_logprobs, _ = plain_tables.evaluate(runs.load("-ref"), rollout)
    losses = []
    for scores, rows in zip(
        step.experience.scores.view(-1, 3), torch.arange(24).view(-1, 3), strict=True
    ):
        assert len(set(scores.tolist())) == 3
        ratios, means = [], []
        for row in (int(rows[scores.argmax()]), int(rows[scores.argmin()])):
            log_p = plain_tables.distribution(policy, rollout, row)
            own = plain_tables.drawn(log_p, rollout, row)
            ratios.append(own.sum() - ref_logprobs[row].sum())
            means.append(ratios[-1] / len(own))
        if scenario is ONLINE_LONG:
            losses.append((means[0] - means[1] - 1 / (2 * 0.5)).square())
        else:
            losses.append(-torch.nn.functional.logsigmoid(0.5 * (ratios[0] - ratios[1])))
    torch.stack(losses).mean().backward()

    squares = [weight.grad.square().sum() for weight in policy.parameters()]
    norm = torch.stack(squares).sum().sqrt().item()
    assert step.metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4), "grad_norm"
    assert step.metrics["training/equal_groups"] == 0.0


def test_the_gradient_is_that_of_the_drawn_pairs_loss(runs: Runs) -> None:
    for scenario in (ONLINE_DEEP, ONLINE_LONG):
        _assert_gradient_of_pairs(runs, scenario)
    with pytest.raises(AssertionError, match="grad_norm"):
        _assert_gradient_of_pairs(runs, ONLINE_OFF)


WITHOUT_ACC = Scenario(
    "likelihood of right responses, which nothing tells",
    [
        "reward.terms=[{name: CUSTOM:letters}, {name: reward_model}]",
        "actor.positive_lm_coef=0.1",
    ],
)


def test_a_function_that_never_says_what_is_right_is_told_on_the_first_step(runs: Runs) -> None:
    for rank in range(4):
        assert runs.error(WITHOUT_ACC, rank).startswith(
            "actor.positive_lm_coef 0.1 needs to know which responses are right, but no reward "
            "term has said so for any response of the batch; let your function return acc"
        )


REMAX = Scenario("remax", ["algorithm.adv_estimator=remax", "algorithm.missing_eos_penalty=0.25"])


def test_remax_takes_off_what_the_greedy_answer_gets(runs: Runs) -> None:
    step = runs.steps(REMAX)[0]
    rollout = step.experience.rollout

    policy = runs.load()
    answers = [_greedy_answer(policy, prompt) for prompt in rollout.prompts.token_ids[::2]]
    baselines = []
    for tokens, reward in zip(
        answers, runs.rewards(Sequences.of(answers, [1] * len(answers))), strict=True
    ):
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
        tokens.append(int(policy(torch.tensor([tokens])).logits[0, -1, :TOKENS].argmax()))
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
        # trained once: that is no fault of the engine.
        assert 0 < metrics["rollout_corr/k3_kl"] < 1e-2
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["training/rollout_probs_diff_valid"] == 1.0
        assert 0.9 < metrics["rollout_corr/rollout_is_mean"] < 1.1
        assert 0.0 <= metrics["rollout_corr/rollout_rs_masked_fraction"] < 1.0


def test_bypass_measures_the_mismatch_also_while_the_critic_warms_up(runs: Runs) -> None:
    one, two = (step.metrics for step in runs.steps(BYPASS_WARM_UP))
    for metrics in (one, two):
        assert abs(metrics["rollout_corr/kl"]) < 0.1
        assert metrics["actor/entropy"] > 1.0
    assert "timing_s/old_log_prob" in one and "timing_s/old_log_prob" not in two


def test_the_engine_and_the_trainer_agree(runs: Runs) -> None:
    assert_engine_and_trainer_agree(runs)
