"""A PPO step is the same on every layout, and makes its experience as written down.

What the models compute is compared with transformers; what is made of it, with loops in this file.
Each scenario stands above the tests of it.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.trainers.ppo.work import Work
from tests.dist.ppo_runs import (
    DP4,
    HORIZON,
    KL_COEF,
    TARGET_KL,
    TP2_PP2,
    WORLD_SIZE,
    Runs,
    Scenario,
    assert_close,
    assert_engine_and_trainer_agree,
    assert_experience_by_hand,
    assert_same_on_every_layout,
)
from tests.oracle import plain_tables

TOKENS = ["rollout.dump_format=parquet"]
DEEP = Scenario(
    "tp2 pp2",
    [
        *TP2_PP2,
        "actor.vpp=2",
        "actor.pp_layers=[0, 1, 1, 0]",
        "critic.tp=4",
        "rollout.tp=2",
        "rollout.verify_reshard=true",
        *TOKENS,
    ],
)
WIDE = Scenario("dp4", [*DP4, *TOKENS])
MIXED = Scenario(
    "tp2 dp2",
    [
        "actor.tp=2",
        "actor.sequence_parallel=true",
        "actor.micro_batch_tokens=16",
        "reward_model.pp=2",
        "reward_model.vpp=2",
        *TOKENS,
    ],
)
SHARED = Scenario(
    "tp2 cp2",
    [
        "actor.tp=2",
        "actor.cp=2",
        "actor.sequence_parallel=true",
        "critic.cp=4",
        "critic.micro_batch_tokens=40",
        "reward_model.cp=2",
        "rollout.tp=4",
        "rollout.verify_reshard=true",
        *TOKENS,
    ],
)


def test_a_step_is_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, DEEP, WIDE, MIXED, SHARED)


def test_all_ranks_tell_the_same(runs: Runs) -> None:
    for scenario in (DEEP, WIDE, MIXED, SHARED):
        for rank in range(1, WORLD_SIZE):
            pairs = zip(runs.steps(scenario, rank), runs.steps(scenario), strict=True)
            for step, wanted in pairs:
                assert step.comparable_metrics == wanted.comparable_metrics


def test_the_engine_and_the_trainer_agree(runs: Runs) -> None:
    assert_engine_and_trainer_agree(runs, without=(ROUNDED, ROUNDED_APART))


def test_training_learns_something_to_compare(runs: Runs) -> None:
    one, two = runs.steps(WIDE)
    for name in (
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/kl_loss",
        "actor/grad_norm",
        "critic/vf_loss",
    ):
        assert abs(one.metrics[name]) > 1e-4, name
        assert abs(one.metrics[name] - two.metrics[name]) > 1e-4, name
    assert len({tuple(response) for response in one.responses}) > 8


def test_the_experience_is_what_the_models_say(runs: Runs) -> None:
    step = runs.steps(DEEP)[0]
    experience = step.experience
    rollout = experience.rollout

    logprobs, entropy = plain_tables.evaluate(runs.load(), rollout)
    assert_close(experience.old_logprobs, logprobs)
    assert_close(experience.ref_logprobs, plain_tables.evaluate(runs.load("-ref"), rollout)[0])
    assert_close(experience.values, plain_tables.token_values(runs.load("-critic"), rollout))

    assert step.metrics["reward/exact_match"] == 0.0  # no answer of a random model is right
    assert_close(experience.scores, torch.tensor(runs.rewards(rollout.sequences())))
    mean_entropy = entropy[rollout.response_mask].mean().item()
    assert step.metrics["actor/entropy"] == pytest.approx(mean_entropy, abs=1e-5)


def test_what_is_written_down_of_a_step_is_its_experience_on_every_layout(runs: Runs) -> None:
    first = runs.table(WIDE, 1)
    rounded = ("score", "terms")  # by a reward model, which each layout computes in its own order
    for scenario in (DEEP, WIDE, MIXED, SHARED):
        step = runs.steps(scenario)[0]
        table = runs.table(scenario, 1)
        for name in first.texts.keys() - set(rounded):
            assert table.texts[name] == first.texts[name], f"{scenario.name}: {name}"
        assert table.texts["score"] == pytest.approx(step.experience.scores.tolist())
        responses = [ids for row in step.responses for ids in row]
        assert table.tokens["response_ids"].tolist() == responses

        experience = step.experience
        mask = experience.rollout.response_mask
        for name, wanted in {
            "advantage": experience.advantages,
            "return": experience.returns,
            "reward": experience.token_rewards,
            "value": experience.values,
            "old_logprob": experience.old_logprobs,
            "rollout_logprob": experience.rollout.rollout_logprobs,
            "ref_logprob": experience.ref_logprobs,
            "loss_mask": experience.loss_mask,
        }.items():
            assert table.tokens[name].tolist() == wanted[mask].tolist(), f"{scenario.name}: {name}"
        assert table.tokens["new_logprob"] == pytest.approx(first.tokens["new_logprob"], abs=1e-3)

    texts = first.texts
    ends = {"stop" if stopped else "length" for stopped in step.experience.rollout.stopped}
    assert set(texts["finish_reason"]) == ends
    for response, tokens in zip(texts["response"], texts["response_tokens"], strict=True):
        assert re.sub("<[^>]*>", "", "".join(tokens)).strip() == response.strip()


def test_the_written_entropy_is_that_of_the_models_distribution(runs: Runs) -> None:
    rollout = runs.steps(DEEP)[0].experience.rollout
    entropy = plain_tables.evaluate(runs.load(), rollout)[1]
    written = torch.tensor(runs.table(DEEP, 1).tokens["entropy"].tolist())
    assert_close(written, entropy[rollout.response_mask])


def test_the_adaptive_coefficient_moves_by_its_formula(runs: Runs) -> None:
    one, two = (step.metrics for step in runs.steps(WIDE))
    assert one["actor/reward_kl_penalty_coeff"] == KL_COEF
    kl = one["actor/reward_kl_penalty"]
    assert abs(kl) > 2 * TARGET_KL  # so the error is clipped to 0.2 or -0.2
    wanted = KL_COEF * (1 + math.copysign(0.2, kl) * 16 / HORIZON)  # a step has 16 samples
    assert two["actor/reward_kl_penalty_coeff"] == pytest.approx(wanted, rel=1e-12)


def test_the_mismatch_is_measured_in_every_step(runs: Runs) -> None:
    names = (
        "kl",
        "k3_kl",
        "training_ppl",
        "rollout_ppl",
        "log_ppl_diff",
        "ppl_ratio",
        "chi2_token",
        "chi2_seq",
    )

    for step in runs.steps(WIDE):
        values = [step.metrics[f"rollout_corr/{name}"] for name in names]
        perplexity = values[2]
        assert values == pytest.approx([0, 0, perplexity, perplexity, 0, 1, 0, 0], abs=1e-4)
        assert perplexity > 5


def test_rewards_and_advantages_by_hand(runs: Runs) -> None:
    assert_experience_by_hand(runs.steps(WIDE)[0], terminal=False)


# One mini-batch, so that the only update of a step must see the very log-probs of before.
TERMINAL = Scenario(
    "terminal",
    [
        "algorithm.kl_placement=terminal",
        "actor.ppo_epochs=1",
        "actor.ppo_mini_batch_size=8",
        "actor.micro_batch_tokens=16",
    ],
)


def test_rewards_and_advantages_by_hand_with_a_terminal_kl(runs: Runs) -> None:
    assert_experience_by_hand(runs.steps(TERMINAL)[0], terminal=True)


def test_the_first_update_sees_the_ratio_one(runs: Runs) -> None:
    for step in runs.steps(TERMINAL):
        assert step.metrics["actor/ppo_kl"] == 0.0
        assert step.metrics["actor/pg_clipfrac"] == 0.0
        assert step.actor_moved and step.critic_moved


# Nothing needs the log-probs of before the update earlier, so its own pass gives them.
ONE_PASS = [
    "algorithm.use_kl_in_reward=false",
    "actor.ppo_epochs=1",
    "actor.ppo_mini_batch_size=8",
    "actor.micro_batch_tokens=32",
    "reference.path=ROOT/llama",
    *TOKENS,
]


def _evaluates_before(patch: pytest.MonkeyPatch, _: int) -> None:
    patch.setattr(Work, "update_evaluates", lambda *_: False)


def _one_pass(name: str, *overrides: str) -> tuple[Scenario, Scenario]:
    """The run, and the run with a pass before each update."""
    own = [*ONE_PASS, *overrides]
    return Scenario(f"one pass, {name}", own), Scenario(f"two, {name}", own, _evaluates_before)


PIPE, PIPE_APART = _one_pass("tp2 pp2", *TP2_PP2, "actor.vpp=2", "actor.pp_layers=[0, 1, 1, 0]")
CONTEXT, CONTEXT_APART = _one_pass(
    "cp2", "actor.cp=2", "actor.share_prompts=true", "actor.policy_loss.loss_mode=gspo"
)
ADAPTED, ADAPTED_APART = _one_pass(
    "tp2 dp2", "actor.tp=2", "actor.sequence_parallel=true", "actor.lora.rank=2"
)
ROUNDED, ROUNDED_APART = _one_pass("dp4", "actor.dtype=bfloat16", "actor.entropy_coeff=0.01")


@pytest.mark.parametrize(
    ("spared", "wanted"),
    [
        (PIPE, PIPE_APART),
        (CONTEXT, CONTEXT_APART),
        (ADAPTED, ADAPTED_APART),
        (ROUNDED, ROUNDED_APART),
    ],
    ids=lambda scenario: scenario.name,
)
def test_an_update_of_one_pass_gives_the_old_log_probs_to_the_last_bit(
    runs: Runs, spared: Scenario, wanted: Scenario
) -> None:
    phase = "timing_s/old_log_prob"
    for rank in range(WORLD_SIZE):
        pairs = zip(runs.steps(spared, rank), runs.steps(wanted, rank), strict=True)
        for step, apart in pairs:
            assert phase not in step.metrics and phase in apart.metrics
            assert step.comparable_metrics == apart.comparable_metrics
            assert step.responses == apart.responses
            assert torch.equal(step.experience.old_logprobs, apart.experience.old_logprobs)
            assert step.actor_moved

    for number in (1, 2):  # the second step's new log-probs are of the weights after both
        table = runs.table(spared, number).tokens
        for name, column in runs.table(wanted, number).tokens.items():
            assert table[name].tolist() == column.tolist(), name


@pytest.mark.parametrize("scenario", [TERMINAL, WIDE])
def test_log_probs_that_are_needed_before_the_update_have_a_pass(
    runs: Runs, scenario: Scenario
) -> None:
    assert all("timing_s/old_log_prob" in step.metrics for step in runs.steps(scenario))


WARM_UP = Scenario("warm-up", [*TP2_PP2, "trainer.critic_warmup=2", *TOKENS])


def test_warm_up_leaves_the_actor_alone(runs: Runs) -> None:
    for rank in range(WORLD_SIZE):
        one, two = runs.steps(WARM_UP, rank)
        assert (one.actor_moved, one.critic_moved) == (False, True)
        assert (two.actor_moved, two.critic_moved) == (True, True)
        assert all(step.actor_moved and step.critic_moved for step in runs.steps(WIDE, rank))
        assert "actor/pg_loss" not in one.metrics and "actor/pg_loss" in two.metrics
        assert "critic/vf_loss" in one.metrics

    unchanged = runs.table(WARM_UP, 1).tokens
    changed = runs.table(WARM_UP, 2).tokens
    assert unchanged["new_logprob"].tolist() == unchanged["old_logprob"].tolist()
    assert abs(changed["new_logprob"] - changed["old_logprob"]).max() > 1e-3


FULL_KL = ["algorithm.kl_penalty=full", "actor.kl_loss_type=full"]
FULL_KL_DEEP = Scenario("full KL, tp2 pp2", [*TP2_PP2, *FULL_KL])
FULL_KL_WIDE = Scenario("full KL, dp4", FULL_KL)


def test_a_step_with_full_kl_is_the_same_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, FULL_KL_DEEP, FULL_KL_WIDE)


def test_full_kl_is_that_of_the_distributions(runs: Runs) -> None:
    step = runs.steps(FULL_KL_DEEP)[0]
    rollout = step.experience.rollout
    kl = plain_tables.full_kl(runs.load(), runs.load("-ref"), rollout)
    mean = (kl.sum(dim=1) / rollout.response_mask.sum(dim=1)).mean().item()
    assert step.metrics["actor/reward_kl_penalty"] == pytest.approx(mean, abs=1e-5)


_TOLD = [
    "critic.template='{{ ground_truth }}={{ prompt }}'",
    "critic.max_prompt_length=12",
    "actor.share_prompts=true",  # the critic's too
]
TOLD_DEEP = Scenario("told, tp2 pp2", [*TP2_PP2, "critic.tp=2", "critic.pp=2", *_TOLD])
TOLD_LONG = Scenario("told, cp2", [*_TOLD, "critic.cp=2", "critic.micro_batch_tokens=32"])


def test_a_critic_that_reads_the_answer_gives_values_for_the_same_tokens(runs: Runs) -> None:
    assert_same_on_every_layout(runs, TOLD_DEEP, TOLD_LONG)
    tokenizer = load_tokenizer(runs.root / "data" / "tokenizer")
    experience = runs.steps(TOLD_DEEP)[0].experience
    rollout = experience.rollout
    prompts = rollout.prompts
    told = [
        tokenizer.encode(f"{answer}={text}")
        for answer, text in zip(prompts.ground_truth, prompts.text, strict=True)
    ]
    critic = runs.load("-critic")
    as_read = replace(rollout, prompts=replace(prompts, token_ids=told))
    assert_close(experience.values, plain_tables.token_values(critic, as_read))
    assert abs(experience.values - plain_tables.token_values(critic, rollout)).max() > 0.01
    # The policy has not read it.
    assert_close(experience.old_logprobs, plain_tables.evaluate(runs.load(), rollout)[0])
    assert runs.steps(TOLD_DEEP)[0].critic_moved


UNUSABLE = Scenario(
    "unusable gradients",
    ["actor.optim={lr: 1.0e-3, skip_grad_norm: 1.0e-9, max_skipped_steps: 3}"],
)


def test_a_run_whose_gradients_are_not_usable_ends_and_leaves_its_batch(runs: Runs) -> None:
    path = runs.output(UNUSABLE) / "failed_step_000001.pt"
    for rank in range(WORLD_SIZE):
        message = runs.error(UNUSABLE, rank)
        assert message.startswith("training step 1: 3 optimizer steps in a row")
        assert message.endswith(f"the batch is in {path}")

    batch = torch.load(path, weights_only=True)
    shapes = {batch[name].shape for name in ("advantages", "response_ids", "response_mask")}
    assert len(shapes) == 1
    assert len(batch["prompts"]) == len(batch["advantages"]) == 16
