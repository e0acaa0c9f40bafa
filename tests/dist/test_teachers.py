"""PPO steps with teachers: of other models, of an earlier self, on drawn and on given responses.

Each scenario stands above the tests of it.
"""

from __future__ import annotations

import pytest
import torch

from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.roles.reference import Teachers
from tests.dist.ppo_runs import (
    DP4,
    MODEL,
    TP2_PP2,
    Runs,
    Scenario,
    assert_close,
    assert_engine_and_trainer_agree,
    assert_same_on_every_layout,
)
from tests.oracle import plain_tables

_ONE_UPDATE = [
    "algorithm.use_kl_in_reward=false",
    "actor.use_kl_loss=false",
    "actor.kl_loss_coef=0.001",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_epochs=1",
]
TEACHER_OF = {"sums": "-ref", "others": "-wide"}  # of other sizes than the policy and each other
_SEVERAL = ", ".join(
    f"{{name: {source}-expert, path: ROOT/{MODEL}{suffix}, data_source: {source}}}"
    for source, suffix in TEACHER_OF.items()
)
SEVERAL = [
    *_ONE_UPDATE,
    "actor.loss_agg_mode=token-mean",
    "reward_model=null",
    "reward.terms=[{name: exact_match, weight: 0}]",  # the teachers alone teach
    "data.train_files=ROOT/data/mixed.jsonl",
    "algorithm.distillation.coef=0.5",
    f"teacher.several=[{_SEVERAL}]",
    "teacher.offload=[params]",
]
IN_LOSS = [*SEVERAL, "algorithm.adv_estimator=grpo"]
SEVERAL_DEEP = Scenario("several teachers, tp2 pp2", [*TP2_PP2, "teacher.tp=2", *IN_LOSS])
SEVERAL_WIDE = Scenario(
    "several teachers, dp4", ["actor.micro_batch_tokens=16", "teacher.pp=2", *IN_LOSS]
)
SEVERAL_LONG = Scenario(
    "several teachers, cp2", ["actor.cp=2", "actor.share_prompts=true", *IN_LOSS]
)
GIVEN = [*IN_LOSS, "reward.terms=[]", "algorithm.distillation.given_share=0.4"]
GIVEN_DEEP = Scenario("given responses, tp2 pp2", [*TP2_PP2, *GIVEN])
GIVEN_WIDE = Scenario("given responses, dp4", ["actor.share_prompts=true", *GIVEN])
IN_REWARD = ["algorithm.distillation.mode=reward", "teacher.cp=2"]
SEVERAL_IN_REWARD = Scenario("several teachers, reward", [*TP2_PP2, *SEVERAL, *IN_REWARD])


def _swap_teachers(patch: pytest.MonkeyPatch, rank: int) -> None:
    right = Teachers.shares

    def wrong(teachers: Teachers, sources: list[str]) -> dict[str, torch.Tensor]:
        shares = right(teachers, sources)
        return dict(zip(shares, reversed(shares.values()), strict=True))

    patch.setattr(Teachers, "shares", wrong)


SEVERAL_SWAPPED = Scenario("several teachers, swapped", [*TP2_PP2, *IN_LOSS], _swap_teachers)


def _assert_taught(runs: Runs, scenario: Scenario) -> None:
    """Divergences and gradient are those of each row with the teacher of its data source alone."""
    step = runs.steps(scenario)[0]
    rollout = step.experience.rollout
    assert not step.experience.advantages.any()
    policy = runs.load()
    teachers = {source: runs.load(suffix) for source, suffix in TEACHER_OF.items()}
    divergences: dict[str, list[torch.Tensor]] = {source: [] for source in teachers}
    for row, source in enumerate(rollout.prompts.data_source):
        log_p = plain_tables.distribution(policy, rollout, row)
        log_q = plain_tables.distribution(teachers[source], rollout, row).detach()
        divergences[source].append(plain_tables.kl_between(log_p, log_q))

    for source, rows in divergences.items():
        of_source = torch.cat(rows).mean().item()
        name = f"actor/distillation_kl/{source}-expert"
        assert step.metrics[name] == pytest.approx(of_source, abs=2e-5), name
    mean = torch.cat([row for rows in divergences.values() for row in rows]).mean()
    assert step.metrics["actor/distillation_kl"] == pytest.approx(mean.item(), abs=2e-5)

    (0.5 * mean).backward()
    squares = [weight.grad.square().sum() for weight in policy.parameters()]
    norm = torch.stack(squares).sum().sqrt().item()
    assert step.metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_each_row_learns_from_the_teacher_of_its_data_source(runs: Runs) -> None:
    _assert_taught(runs, SEVERAL_DEEP)
    assert_same_on_every_layout(runs, SEVERAL_DEEP, SEVERAL_WIDE, SEVERAL_LONG)
    with pytest.raises(AssertionError, match="distillation_kl/sums-expert"):
        _assert_taught(runs, SEVERAL_SWAPPED)


def test_a_teacher_alone_teaches_on_the_responses_of_the_rows(runs: Runs) -> None:
    _assert_taught(runs, GIVEN_DEEP)
    assert_same_on_every_layout(runs, GIVEN_DEEP, GIVEN_WIDE)
    tokenizer = load_tokenizer(runs.root / "data" / "tokenizer")
    counts = set()
    for step in runs.steps(GIVEN_DEEP):
        rollout = step.experience.rollout
        counts.add(int(rollout.given.sum()))
        for row in rollout.given.nonzero()[:, 0].tolist():
            ids = rollout.response_ids[row, : rollout.response_lengths[row]].tolist()
            texts = ["1+" + rollout.prompts.ground_truth[row][:1], "-12"]
            text = texts[rollout.sample_index[row]]
            assert ids == tokenizer.encode_response(text)
            assert not rollout.loss_mask[row].any()
        assert rollout.loss_mask[~rollout.given].any(dim=1).all()
        assert not any(name.startswith("training/equal") for name in step.metrics)
    assert counts <= {6, 8}  # 0.4 of 8 prompts, 2 samples each


def test_each_row_is_praised_by_the_teacher_of_its_data_source(runs: Runs) -> None:
    step = runs.steps(SEVERAL_IN_REWARD)[0]
    experience = step.experience
    rollout = experience.rollout
    assert experience.old_logprobs is not None
    sources = rollout.prompts.data_source
    for source, suffix in TEACHER_OF.items():
        rows = torch.tensor([own == source for own in sources])
        logprobs, _ = plain_tables.evaluate(runs.load(suffix), rollout)
        praise = (logprobs - experience.old_logprobs) * rollout.loss_mask
        assert rows.any() and praise[rows].abs().max() > 0.01
        assert_close(experience.token_rewards[rows], 0.5 * praise[rows])
        mean = -praise[rows].sum().item() / int(rollout.loss_mask[rows].sum())
        name = f"actor/distillation_kl/{source}-expert"
        assert step.metrics[name] == pytest.approx(mean, abs=2e-5)


EARLIER = [
    *_ONE_UPDATE,
    "teacher.weights=earlier",
    "teacher.offload=[params]",
]
AVERAGED = [*EARLIER, "teacher.decay=0.5"]
AVERAGED_DEEP = Scenario("average, tp2 pp2", [*TP2_PP2, *AVERAGED])
AVERAGED_WIDE = Scenario("average, dp4", [*DP4, *AVERAGED])
CAUGHT_UP = Scenario("the policy before, tp2 pp2", [*TP2_PP2, *EARLIER])
_PRAISE = ["algorithm.distillation.mode=reward", "algorithm.distillation.coef=0.5"]
OF_TWO_STEPS = Scenario("first, reward, tp2 pp2", [*TP2_PP2, *EARLIER, *_PRAISE, "teacher.every=2"])


def test_a_policy_learns_from_its_earlier_self_on_every_layout(runs: Runs) -> None:
    assert_same_on_every_layout(runs, AVERAGED_DEEP, AVERAGED_WIDE)
    name = "actor/distillation_kl"
    for scenario in (AVERAGED_DEEP, CAUGHT_UP):
        one, two = runs.steps(scenario)
        assert one.actor_moved and abs(one.metrics[name]) < 1e-6  # it begins as the policy
        assert (two.metrics[name] > 1e-5) == (scenario is AVERAGED_DEEP)


def test_a_policy_is_praised_by_its_earlier_self(runs: Runs) -> None:
    step = runs.steps(OF_TWO_STEPS)[1]
    experience = step.experience
    rollout = experience.rollout
    assert experience.old_logprobs is not None
    logprobs, _ = plain_tables.evaluate(runs.load(), rollout)
    praise = (logprobs - experience.old_logprobs) * rollout.loss_mask
    assert praise.abs().max() > 0.01
    mean = -praise.sum().item() / int(rollout.loss_mask.sum())
    assert step.metrics["actor/distillation_kl"] == pytest.approx(mean, abs=2e-5)
    last = torch.tensor(rollout.response_lengths)[:, None] - 1
    praise = praise.scatter(1, last, 0.0)  # there is the score too
    assert_close(experience.token_rewards.scatter(1, last, 0.0), 0.5 * praise)


def test_the_engine_and_the_trainer_agree(runs: Runs) -> None:
    assert_engine_and_trainer_agree(runs)
