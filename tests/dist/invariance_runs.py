"""Trains a fine-tuned model, a reward model, critics and an actor in a rank, row by row of the
invariance matrix, and once more with the plain loops.

A test compares the two. This file starts no ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from mrlhf.batch import Rollout
from mrlhf.config.algorithm import ReturnsSection
from mrlhf.config.pair_losses import RewardLossSection
from mrlhf.config.sections import RoleSection
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.roles.actor import Actor
from mrlhf.roles.reference import Reference, Teacher, Teachers
from mrlhf.roles.token_logprobs import ReferenceStates
from mrlhf.roles.update_progress import UpdateProgress
from mrlhf.trainers.critic import ValueLearning
from mrlhf.trainers.reward_model import PreferenceLearning
from mrlhf.trainers.sft import FineTuning
from mrlhf.training import optimizer_states
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.shard import Key
from tests.covering import Row
from tests.dist.invariance_axes import LOSSES, name_of, optim_keys, role_keys
from tests.dist.role_runs import (
    Form,
    Setting,
    build_actor,
    build_critic,
    build_reference,
    build_supervised,
    build_teacher,
    cut_responses,
    load_experience,
    tables_of,
)
from tests.metric_rows import without_row
from tests.oracle import plain_ppo, plain_supervised, plain_tables
from tests.oracle.plain_experience import taught
from tests.oracle.plain_models import critic_of
from tests.oracle.plain_optimizer import Outcome
from tests.oracle.plain_ppo import Case
from tests.oracle.plain_supervised import (
    CENTRING,
    GAMMA,
    HELD_OUT,
    LAM,
    MARGINS,
    PAIR_STEPS,
    SFT_STEPS,
    SMOOTHING,
    TIE_THRESHOLD,
    TIES,
    VALUE_STEPS,
)

ROLES = ("sft", "rm", "values", "critic", "actor")
# What torch calls when gathers are coalesced, in its versions 2.11 to 2.13.
COALESCED_GATHERS = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")


@dataclass(frozen=True)
class Trained:
    """One role of one row, as one rank sees it."""

    metrics: dict[str, float]  # those of the last step, or of the update; the validation's too
    digests: dict[Key, int]  # of each slice of a weight that this rank holds


@dataclass(frozen=True)
class RowResult:
    """One row, as one rank sees it."""

    # What actor, critic and reference say of the batch before training, by name.
    tables: dict[str, list[list[float]]]
    trained: dict[str, Trained]  # by role
    # Metrics of one more step of the actor, on log-probabilities that it has just computed.
    fresh: dict[str, float]


def case_of(row: Row) -> Case:
    """The row's model, losses, optimizer, and what is trained."""
    own = {key: row[key] for key in ("router_losses", "lora", "optimizer", "freeze")}
    return Case(row["model"], **own, **LOSSES[row["loss"]])


def train_rows(rank: int, world_size: int, root: str, rows: Sequence[Row]) -> dict[str, RowResult]:
    """Train each row, by its name; the weights go to `<root>/<row>/<role>`."""
    factory = GroupFactory(timeout_s=600.0)
    # Coalesced gathers crash gloo now and then: see `mrlhf.training.data_parallel`.
    coalesced = [name for name in COALESCED_GATHERS if hasattr(dist.ProcessGroup, name)]
    without_them = mock.patch.multiple(dist.ProcessGroup, **dict.fromkeys(coalesced))
    with without_them, mock.patch.object(optimizer_states, "STREAMED_BYTES", 1 << 13):
        return {name_of(row): train_row(Path(root), factory, row, Path(root)) for row in rows}


def plain_supervised_roles(root: Path, case: Case) -> dict[str, Outcome]:
    """Fine-tuned model and reward model as the plain loops train them."""
    rollout = _rollout(root, case)
    examples = plain_supervised.sft_examples(rollout)
    pairs = plain_supervised.preference_pairs(rollout)
    responses = plain_supervised.scored_responses(rollout)
    critic = root / critic_of(case.model)
    return {
        "sft": plain_supervised.train_sft(root / case.model, examples, case),
        "rm": plain_supervised.train_reward_model(critic, pairs, case),
        "values": plain_supervised.train_values(critic, responses, case),
    }


def plain_ppo_roles(root: Path, case: Case) -> dict[str, Outcome]:
    """Critic and actor as the plain loops train them."""
    experience = load_experience(root, case)
    return {
        "critic": plain_ppo.train_critic(case, root / case.model, experience),
        "actor": plain_ppo.train_actor(case, root / case.model, experience),
    }


def train_row(root: Path, factory: GroupFactory, row: Row, out: Path) -> RowResult:
    """Train one row of the models in `root`; the weights go to `<out>/<row>/<role>`."""
    keys = role_keys(row)
    sizes = AxisSizes.of(RoleSection(path=".", **keys))
    layout = ParallelLayout.for_world("model", row["ranks"], sizes)
    form = Form(
        name_of(row),
        row["micro_batch_tokens"],
        row["use_distributed_optimizer"],
        keys=keys,
        optim=optim_keys(row),
    )
    setting = Setting(root, factory.role_groups(layout), form)

    case = case_of(row)
    actor = build_actor(setting, case)
    critic = build_critic(setting, case)
    reference = build_reference(setting, case)
    whole = load_experience(root, Case(case.model, "token-mean"))
    tables = tables_of(actor, critic, reference, whole.rollout)

    experience = load_experience(root, case)
    as_read = experience.rollout.sequences(_own_prompts(case, experience.rollout))
    cut = critic.engine.cut(as_read, "response", plain_ppo.MINI_BATCH)
    of_critic = critic.update(experience, cut)
    other: Reference | Teacher | None = reference if case.has_full_kl else None
    if case.teacher:
        # Its ranks are others than those of most rows.
        sizes = AxisSizes(tp=2, pp=2 if row["ranks"] >= 4 else 1)
        groups = factory.role_groups(ParallelLayout.for_world("teacher", row["ranks"], sizes))
        other = build_teacher(setting, case, groups, actor)
        if case.teacher_is_base:
            policy = actor.engine
            other = Teacher(policy, plain_tables.TEMPERATURE, None, policy.adapters.off)
    of_actor = _update_actor(setting, case, actor, other)
    trained = {
        "sft": _train_sft(setting, case),
        "rm": _train_reward_model(setting, case),
        "values": _train_values(setting, case),
        "critic": (critic.engine, of_critic),
        "actor": (actor.engine, of_actor),
    }

    results = {}
    for role, (engine, metrics) in trained.items():
        assert without_row(metrics) == []
        results[role] = Trained(metrics, _digests(engine))
        engine.export(out / name_of(row) / role, 10**9)
    fresh = _fresh_step(setting, case, actor, other)
    return RowResult({name: table.tolist() for name, table in tables.items()}, results, fresh)


def _update_actor(
    setting: Setting, case: Case, actor: Actor, other: Reference | Teacher | None
) -> dict[str, float]:
    experience = load_experience(setting.root, case)
    cut = cut_responses(actor, experience.rollout, plain_ppo.MINI_BATCH)
    states = _states_of(case, other, experience.rollout, cut, actor)
    return actor.update(experience, cut, states).metrics


def _states_of(
    case: Case, other: Reference | Teacher | None, rollout: Rollout, cut: BatchCut, actor: Actor
) -> list[ReferenceStates] | None:
    """What the actor's loss needs of the other model."""
    if isinstance(other, Teacher):
        as_read = rollout.sequences(_own_prompts(case, rollout))
        asked = cut.packs if actor.engine.groups.is_last_stage else []
        return Teachers({"": other}, {}).states_for(rollout.prompts.data_source, as_read, asked)
    return None if other is None else other.states(cut)


def _own_prompts(case: Case, rollout: Rollout) -> list[list[int]] | None:
    """The prompts that teacher and critic read, if they are others than the actor's."""
    return taught(rollout).prompts.token_ids if case.demonstrates else None


def _fresh_step(
    setting: Setting, case: Case, actor: Actor, other: Reference | Teacher | None
) -> dict[str, float]:
    """Evaluate the whole batch as one mini-batch, and train on it once."""
    experience = load_experience(setting.root, case)
    rollout = experience.rollout
    cut = cut_responses(actor, rollout)
    logprobs = actor.evaluate(rollout, cut).logprobs
    states = _states_of(case, other, rollout, cut, actor)

    # All epochs but one are done.
    progress = UpdateProgress(mini_batches=plain_ppo.EPOCHS - 1)
    experience = replace(experience, old_logprobs=logprobs)
    return actor.update(experience, cut, states, progress).metrics


def _train_sft(setting: Setting, case: Case) -> tuple[ModelEngine, dict[str, float]]:
    engine = build_supervised(setting, case, case.model, "lm")
    examples = plain_supervised.sft_examples(_rollout(setting.root, case))
    task = FineTuning(examples, examples[:HELD_OUT])
    metrics: dict[str, float] = {}
    for rows in SFT_STEPS:
        metrics = task.step(engine, rows)
    # The few rows of the task have no error.
    errors = {"se/val/loss": FineTuning(examples, examples).validate(engine)["se/val/loss"]}
    return engine, metrics | task.validate(engine) | errors


def _train_reward_model(setting: Setting, case: Case) -> tuple[ModelEngine, dict[str, float]]:
    engine = build_supervised(setting, case, critic_of(case.model), "scalar")
    pairs = plain_supervised.preference_pairs(_rollout(setting.root, case))
    held_out = replace(
        pairs,
        responses=pairs.responses[:HELD_OUT],
        prompt_lengths=pairs.prompt_lengths[:HELD_OUT],
        margins=[*MARGINS[:HELD_OUT]],
        ties=[*TIES[:HELD_OUT]],
    )
    plain = PreferenceLearning(RewardLossSection(), replace(pairs, margins=None, ties=None), None)
    assert "rm/centring" not in plain.step(engine, PAIR_STEPS[0])
    for rows in (plain_supervised.rankings(pairs), plain_supervised.numbered(pairs)):
        PreferenceLearning(RewardLossSection(), rows, None).step(engine, range(len(rows)))

    section = RewardLossSection(
        tie_column="tie",
        tie_threshold=TIE_THRESHOLD,
        centring=CENTRING,
        label_smoothing=SMOOTHING,
    )
    task = PreferenceLearning(section, pairs, held_out)
    metrics = task.step(engine, PAIR_STEPS[-1])
    return engine, metrics | task.validate(engine)


def _train_values(setting: Setting, case: Case) -> tuple[ModelEngine, dict[str, float]]:
    engine = build_supervised(setting, case, critic_of(case.model), "scalar")
    responses = plain_supervised.scored_responses(_rollout(setting.root, case))
    metrics: dict[str, float] = {}
    for rows, lam in zip(VALUE_STEPS, (1.0, LAM), strict=True):
        section = ReturnsSection(gamma=GAMMA, lam_critic=lam)
        task = ValueLearning(section, responses, responses[:HELD_OUT])
        metrics = task.step(engine, rows)
    return engine, metrics | task.validate(engine)


def _rollout(root: Path, case: Case) -> Rollout:
    """The case's rollout with one sequence a row, for the supervised roles."""
    return load_experience(root, replace(case, contexts=False)).rollout


def _digests(engine: ModelEngine) -> dict[Key, int]:
    with engine.residency.needing("params"):
        return {
            slot.piece.key: zlib.crc32(slot.load().clone().numpy().tobytes())
            for slot in engine.slots
        }
