"""Replayed experts: recorded by the trainer itself, or forced, on layouts of all axes.

Forced experts are random, so a loop over transformers whose routers are made to choose them is far
from one whose routers choose by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe

from mrlhf.batch import Experience, Rollout
from mrlhf.parallel.layout import AxisSizes
from mrlhf.records import ExpertRecord
from mrlhf.roles.actor import Actor
from tests.dist.ppo_runs import Runs, Scenario, assert_same_on_every_layout
from tests.dist.role_runs import (
    MANY_PACKS,
    SEQUENCE_PARALLEL,
    Form,
    Setting,
    actor_optim,
    assert_near,
    assert_weights,
    build_actor,
    cut_responses,
    load_experience,
    save_inputs,
    settings,
    update_actor,
)
from tests.oracle import plain_experience, plain_models, plain_ppo, plain_tables
from tests.oracle.plain_ppo import Case, Outcome
from tests.ranks import run_ranks

CASE = Case("qwen2-moe", "token-mean", {"entropy_coeff": 0.05}, clip_grad=1.0)
MLP_AGAIN = Form("mlp again", 20, distributed_optimizer=True, recompute="mlp")
LAYOUTS = {
    1: [AxisSizes()],
    4: [
        AxisSizes(pp=2, ep=2),
        AxisSizes(tp=2, cp=2, ep=2),
        AxisSizes(pp=2, vpp=2, ep=2),
        AxisSizes(tp=2, pp=2, ep=2, etp=1),
    ],
}
MIXTURES = 3  # of four layers the first one is dense
EXPERTS = 4
PER_TOKEN = 2
UNRECORDED = 3  # a row of the batch
RESPONSE_TOKENS = sum(plain_experience.RESPONSE_LENGTHS)
# Row, position in the sequence, and mixture of choices that are changed. The prompts of these rows
# have 1, 3 and 3 tokens, so the third one is not where a log-probability comes from.
CHANGED = ((0, 0, 0), (0, 2, 2), (1, 1, 1), (3, 4, 0), (3, 4, 1))
COUNTED = 4


def _counts() -> Tensor:
    """The tokens of each row of the rollout but the last one."""
    lengths = zip(plain_experience.PROMPT_LENGTHS, plain_experience.RESPONSE_LENGTHS, strict=True)
    return torch.tensor([prompt + response - 1 for prompt, response in lengths])


def _forced() -> ExpertRecord:
    """Random experts, in another order than that of the rows, and none for one row."""
    counts = _counts()
    counts[UNRECORDED] = 0
    generator = torch.Generator().manual_seed(11)
    scores = torch.rand(int(counts.sum()), MIXTURES, EXPERTS, generator=generator)
    order = torch.arange(len(counts)).flip(0)
    begins = torch.empty_like(counts)
    begins[order] = counts[order].cumsum(0) - counts[order]
    return ExpertRecord(scores.argsort(dim=-1)[..., :PER_TOKEN].to(torch.uint8), begins, counts)


def _changed(record: ExpertRecord) -> ExpertRecord:
    """The same, with every choice in another order, and other experts at `CHANGED`."""
    chosen = record.chosen.flip(-1)
    for row, position, mixture in CHANGED:
        place = int(record.begins[row]) + position
        held = chosen[place, mixture].tolist()
        chosen[place, mixture, 0] = next(e for e in range(EXPERTS) if e not in held)
    return replace(record, chosen=chosen)


@contextmanager
def _routers_are_forced(rollout: Rollout, record: ExpertRecord | None) -> Iterator[list[Tensor]]:
    """transformers' routers choose what the record says, where it says something.

    Yields:
        The choices of each call of a router, in the order of the calls.
    """
    row_of = {tuple(rollout.sequences()[row].tolist()): row for row in range(len(rollout))}
    now = {"row": 0, "mixture": 0}
    choices: list[Tensor] = []
    model_forward = qwen2_moe.Qwen2MoeModel.forward

    def forward(self: Any, input_ids: Tensor, **options: Any) -> Any:
        now.update(row=row_of[tuple(input_ids[0].tolist())], mixture=0)
        return model_forward(self, input_ids, **options)

    def route(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        scores = logits.softmax(dim=-1)
        chosen = scores.topk(self.top_k, dim=-1).indices
        if record is not None:
            begin = int(record.begins[now["row"]])
            count = int(record.counts[now["row"]])
            chosen[:count] = record.chosen[begin : begin + count, now["mixture"]].long()
        now["mixture"] += 1
        choices.append(chosen)
        shares = scores.gather(1, chosen)
        return logits, shares / shares.sum(dim=-1, keepdim=True), chosen

    with (
        mock.patch.object(qwen2_moe.Qwen2MoeModel, "forward", forward),
        mock.patch.object(qwen2_moe.Qwen2MoeTopKRouter, "forward", route),
    ):
        yield choices


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, and an experience."""
    directory = tmp_path_factory.mktemp("replay")
    save_inputs(directory, layers=4, models=[CASE.model])
    return directory


def _logprobs(actor: Actor, rollout: Rollout) -> tuple[Tensor, float | None, ExpertRecord | None]:
    evaluation = actor.evaluate(rollout, cut_responses(actor, rollout, plain_ppo.MINI_BATCH))
    return evaluation.logprobs, evaluation.disagreement, evaluation.experts


def _in_ranks(rank: int, world_size: int, root: str) -> dict[str, dict[str, Any]]:
    results = {}
    forms = (MANY_PACKS, SEQUENCE_PARALLEL, MLP_AGAIN)
    for setting in settings(Path(root), world_size, forms, LAYOUTS):
        if setting.form is not MLP_AGAIN or setting.groups.layout.tp == 1:
            results[setting.name] = _replays(setting, Path(root) / "out" / setting.name)
    return results


def _replays(setting: Setting, out: Path) -> dict[str, Any]:
    """What actors of each kind of replay compute in one layout."""
    experience = load_experience(setting.root, CASE)
    rollout = experience.rollout
    still = actor_optim(setting, CASE).model_copy(update={"lr": 0.0})
    found: dict[str, Any] = {}

    own, nothing, record = _logprobs(build_actor(setting, CASE, router_replay="old"), rollout)
    assert record is not None and nothing is None
    found["record"] = record.chosen.sort(dim=-1).values.tolist()
    recorded = replace(rollout, experts=record)
    changed = replace(rollout, experts=_changed(record))
    forced = replace(rollout, experts=_forced())

    for replay in ("none", "rollout", "old"):
        actor = build_actor(setting, CASE, optim=still, router_replay=replay)
        again, disagreement, kept = _logprobs(actor, recorded)
        assert torch.equal(again, own), f"{setting.name}, {replay}: other log-probabilities"
        assert (kept is not None) == (replay == "old")
        found[f"{replay}: same"] = disagreement
        found[f"{replay}: changed"] = _logprobs(actor, changed)[1]

        # Nothing is learned, so the ratio is 1 in every mini-batch of every epoch.
        old, _, kept = _logprobs(actor, forced)
        replayed = replace(experience, rollout=forced, old_logprobs=old, experts=kept)
        found[f"{replay}: kl"] = update_actor(actor, replayed, plain_ppo.MINI_BATCH)["actor/ppo_kl"]
        if replay == "rollout":
            found["forced"] = old.tolist()

    for replay in ("rollout", "old"):
        record_of = {"rollout": replace(experience, rollout=forced)}
        record_of["old"] = replace(experience, experts=_forced())
        actor = build_actor(setting, CASE, router_replay=replay)
        found[f"{replay}: metrics"] = update_actor(actor, record_of[replay], plain_ppo.MINI_BATCH)
        actor.engine.export(out / replay, 10**9)
    return found


@pytest.fixture(scope="module")
def expected(root: Path) -> tuple[Tensor, Outcome, list[Any]]:
    """The plain loop with forced experts, and the experts that it would choose."""
    experience = load_experience(root, CASE)
    rollout = experience.rollout
    with _routers_are_forced(rollout, None) as choices:
        plain_tables.evaluate(plain_models.load(root / CASE.model), rollout)
    rows = [torch.stack(choices[i : i + MIXTURES], dim=1) for i in range(0, len(choices), MIXTURES)]
    chosen = torch.cat([row[:-1] for row in rows]).sort(dim=-1).values

    with _routers_are_forced(rollout, _forced()):
        logprobs, _ = plain_tables.evaluate(plain_models.load(root / CASE.model), rollout)
        outcome = plain_ppo.train_actor(CASE, root / CASE.model, experience)
    return logprobs, outcome, chosen.tolist()


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_replay_on_every_layout(
    root: Path, expected: tuple[Tensor, Outcome, list[Any]], world_size: int
) -> None:
    logprobs, outcome, chosen = expected
    ranks = run_ranks(world_size, _in_ranks, str(root))
    assert len(ranks[0]) == (2 if world_size == 1 else 8)
    share = COUNTED / (RESPONSE_TOKENS * MIXTURES)

    for label, found in ranks[0].items():
        assert all(rank[label] == found for rank in ranks), f"{label}: the ranks differ"
        assert found["record"] == chosen, f"{label}: other experts than transformers"
        for replay in ("none", "rollout", "old"):
            assert found[f"{replay}: same"] == 0.0
            assert found[f"{replay}: kl"] == 0.0, f"{label}, {replay}: the ratio is not 1"
        for replay in ("none", "old"):
            assert found[f"{replay}: changed"] == share, label

        assert_near(torch.tensor(found["forced"]), logprobs, atol=1e-5, title=label)
        for replay in ("rollout", "old"):
            title = f"{label}, {replay}"
            metrics = found[f"{replay}: metrics"]
            for name, value in outcome.metrics.items():
                assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), f"{title}: {name}"
            assert_weights(root / "out" / label / replay, outcome.weights, 1e-5, title)


def test_forced_experts_change_the_numbers(
    root: Path, expected: tuple[Tensor, Outcome, list[Any]]
) -> None:
    experience: Experience = load_experience(root, CASE)
    own, _ = plain_tables.evaluate(plain_models.load(root / CASE.model), experience.rollout)
    apart = (own - expected[0]).abs().amax(dim=1)
    assert apart[UNRECORDED] == 0.0
    assert (apart[torch.arange(len(apart)) != UNRECORDED] > 0.01).all()


# Whole steps: generation records, evaluation compares, the update replays.
MOE = [
    "actor.path=ROOT/qwen2-moe",
    "reference.path=ROOT/qwen2-moe-ref",
    "critic.path=ROOT/qwen2-moe-critic",
]
EP2_PP2 = ["actor.ep=2", "actor.pp=2"]
TP2_CP2 = ["actor.tp=2", "actor.cp=2", "actor.ep=2", "actor.sequence_parallel=true", "rollout.tp=2"]
NONE = Scenario("none", [*MOE, *EP2_PP2])
ROLLOUT = Scenario("rollout", [*MOE, *EP2_PP2, "actor.router_replay=rollout"])
OLD = Scenario("old", [*MOE, *EP2_PP2, "actor.router_replay=old"])
ROLLOUT_TP = Scenario("rollout tp", [*MOE, *TP2_CP2, "actor.router_replay=rollout"])
OLD_TP = Scenario("old tp", [*MOE, *TP2_CP2, "actor.router_replay=old"])


def test_steps_replay_and_measure(runs: Runs) -> None:
    assert_same_on_every_layout(runs, ROLLOUT, ROLLOUT_TP)
    assert_same_on_every_layout(runs, OLD, OLD_TP)
    for scenario in (NONE, ROLLOUT, OLD, ROLLOUT_TP, OLD_TP):
        for step in runs.steps(scenario):
            # In float32 the engine computes what the trainer computes.
            assert step.metrics["training/rollout_experts_differ"] == 0.0, scenario.name
            recorded = step.experience.rollout.experts
            assert recorded is not None
            lengths = step.experience.rollout.sequences().lengths
            assert torch.equal(recorded.counts, lengths - 1)
            assert recorded.chosen.shape == (int((lengths - 1).sum()), 1, PER_TOKEN)

            kept = step.experience.experts
            assert (kept is not None) == (scenario in (OLD, OLD_TP))
            if kept is not None:
                assert torch.equal(kept.chosen.sort().values, recorded.chosen.sort().values)
