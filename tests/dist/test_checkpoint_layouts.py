"""A checkpoint loads into every layout and optimizer, and training then goes on as it would have.

Actor (tied embeddings and biases, q, k and v in one tensor, adapters, or matrices that Muon
orthogonalises; mixtures of experts, of which one has numbers that no optimizer knows) are trained,
saved and trained on; then each saved state is loaded into every other layout, saved again and
compared bit by bit, and some are trained on. Moments of AdamW are no moments of Muon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.checkpoint.manifest import critic_beside
from mrlhf.checkpoint.restorer import open_checkpoint
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.checkpoint.slice_reader import SliceReader
from mrlhf.errors import CheckpointError
from mrlhf.parallel.layout import AxisSizes
from mrlhf.preflight.model_bytes import training_bytes
from mrlhf.roles.actor import Actor
from mrlhf.trainers.checkpoints import warm_start
from tests.dist.role_runs import (
    STAGED,
    Form,
    Setting,
    build_actor,
    build_critic,
    cut_responses,
    load_experience,
    save_inputs,
    settings,
    update_actor,
)
from tests.dist.saved_checkpoints import assert_equal_checkpoints
from tests.oracle import plain_models, plain_ppo
from tests.oracle.plain_ppo import Case
from tests.ranks import everyone, run_ranks

SHARDED = Form("sharded", 1000, distributed_optimizer=True)
PLAIN = Form("plain", 1000, distributed_optimizer=False)
LAYOUTS = {
    1: [AxisSizes()],
    2: [AxisSizes(tp=2), AxisSizes(pp=2), AxisSizes(cp=2)],
    4: [AxisSizes(tp=2, pp=2), AxisSizes(pp=2), AxisSizes(tp=4), AxisSizes(tp=2, cp=2)],
}
# Rounded to bfloat16, a ratio lies on either side of a clip's edge as the layout rounds, and one
# token more or less then changes the norm by half; so nothing is clipped.
ROUNDED = {
    "dtype": "bfloat16",
    "clip_ratio_low": 0.99,
    "clip_ratio_high": 1e4,
    "clip_ratio_c": 1e4,
}
DENSE = {
    "float32": Case("qwen2-tied", "token-mean"),
    "bfloat16": Case("phi3", "token-mean", ROUNDED),
    "adapters": Case("llama", "token-mean", ROUNDED, lora=True),
    "frozen": Case("llama", "token-mean", ROUNDED, freeze=True),
    "muon": Case("phi3", "token-mean", ROUNDED, optimizer="muon"),
}
EXPERT_LAYOUTS = {
    1: [AxisSizes()],
    2: [AxisSizes(ep=2), AxisSizes(tp=2, etp=1), AxisSizes(pp=2)],
    4: [
        AxisSizes(pp=2, ep=2),
        AxisSizes(tp=2, ep=2),
        AxisSizes(tp=2, ep=2, etp=2),
        AxisSizes(tp=2, ep=4),
    ],
}
EXPERTS = {
    "experts": Case("qwen2-moe", "token-mean"),
    "rounded experts": Case("deepseek-v3", "token-mean", ROUNDED),
}
CASES = DENSE | EXPERTS
# What is read from a checkpoint leaves the device and comes back.
OFFLOADED = {"offload": ["params", "grads", "optimizer"]}


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Takes world sizes, and whether models have experts; a directory with models and experiences,
    and a checkpoint of each layout and optimizer of these sizes.
    """

    @cache
    def save(*world_sizes: int, experts: bool = False) -> Path:
        path = tmp_path_factory.mktemp("checkpoints")
        cases = EXPERTS if experts else DENSE
        save_inputs(path, models=[case.model for case in cases.values()])
        for world_size in world_sizes:
            run_ranks(world_size, _save_from_every_layout, path, experts)
        return path

    return save


@pytest.mark.parametrize(
    ("world_size", "savers"),
    [(2, (2,)), *(pytest.param(size, tuple(LAYOUTS), marks=pytest.mark.full) for size in LAYOUTS)],
)
def test_every_layout_takes_every_checkpoint(
    saved_by: Callable[..., Path], world_size: int, savers: tuple[int, ...]
) -> None:
    saved = sum(len(LAYOUTS[size]) for size in savers)
    for loaded in run_ranks(world_size, _load_into_every_layout, saved_by(*savers), False):
        assert len(set(loaded)) >= len(LAYOUTS[world_size]) * len(DENSE) * saved


@pytest.mark.full
@pytest.mark.parametrize("world_size", EXPERT_LAYOUTS)
def test_every_layout_of_experts_takes_every_checkpoint(
    saved_by: Callable[..., Path], world_size: int
) -> None:
    root = saved_by(*EXPERT_LAYOUTS, experts=True)
    saved = sum(map(len, EXPERT_LAYOUTS.values()))
    for loaded in run_ranks(world_size, _load_into_every_layout, root, True):
        assert len(set(loaded)) >= len(EXPERT_LAYOUTS[world_size]) * len(EXPERTS) * saved


def _saver(directory: Path, asynchronous: bool) -> Saver:
    return Saver(directory, RunIdentity("test", {}), everyone(), asynchronous)


def _all_settings(
    root: Path, world_size: int, experts: bool = False
) -> list[tuple[str, Case, Setting]]:
    if experts:
        overlapped = replace(SHARDED, optim={"overlap_param_gather": True})
        everywhere = settings(root, world_size, (overlapped, PLAIN), EXPERT_LAYOUTS)
        return [(name, case, each) for each in everywhere for name, case in EXPERTS.items()]

    every = []
    everywhere = settings(root, world_size, (SHARDED, PLAIN), LAYOUTS)
    staged = settings(root, world_size, (SHARDED, PLAIN), {4: [STAGED]})
    for setting in chain(everywhere, staged):
        for dtype, case in DENSE.items():
            if case.model in plain_models.DEEP or not setting.is_staged:
                every.append((dtype, case, setting))
    return every


def _directory(root: Path, dtype: str, setting: Setting) -> Path:
    return root / "saved" / dtype / setting.name.replace(" ", "-")


def _save_from_every_layout(rank: int, world_size: int, root: Path, experts: bool) -> None:
    for number, (dtype, case, setting) in enumerate(_all_settings(root, world_size, experts)):
        directory = _directory(root, dtype, setting)
        experience = load_experience(root, case)
        actor = build_actor(setting, case)
        saver = _saver(directory, asynchronous=number % 2 == 1)

        update_actor(actor, experience, plain_ppo.MINI_BATCH)
        saver.save(Contents(1, False, {"actor": actor.engine}, {"numbers": [1, 2]}))
        metrics = update_actor(actor, experience, plain_ppo.MINI_BATCH)
        saver.finish(wait=True)  # what a thread writes must not see the second update

        saver.save(Contents(2, False, {"actor": actor.engine}, {}))
        saver.finish(wait=True)
        if rank == 0:
            torch.save(metrics, directory / "metrics")


def _load_into_every_layout(rank: int, world_size: int, root: Path, experts: bool) -> list[Any]:
    loaded = []
    for dtype, case, setting in _all_settings(root, world_size, experts):
        own = _directory(root, dtype, setting)
        trained_on = False
        for directory in sorted((root / "saved" / dtype).iterdir()):
            if own != directory and not _is_their_turn(own, directory):
                continue
            checkpoint = open_checkpoint(directory / "step_000001", everyone())
            assert checkpoint.state == {"numbers": [1, 2]}
            actor = _empty_actor(setting, case)
            checkpoint.load_models({"actor": actor.engine})
            if dtype == "muon":
                _assert_bytes_as_planned(actor)

            again = root / "again" / f"{world_size}-{own.name}-{directory.name}-{dtype}"
            saver = _saver(again, asynchronous=False)
            saver.save(Contents(1, False, {"actor": actor.engine}, {}))
            if rank == 0:
                assert_equal_checkpoints(directory / "step_000001", again / "step_000001")

            loaded.append((_layout_of(own), dtype, directory.name))
            exact = own.name == directory.name
            # What was saved again is the same; that the model computes with it is seen of its own
            # checkpoint and of one of another layout.
            if exact or not trained_on:
                trained_on |= not exact
                metrics = update_actor(actor, load_experience(root, case), plain_ppo.MINI_BATCH)
                wanted = torch.load(directory / "metrics", weights_only=True)
                _assert_metrics_near(metrics, wanted, dtype, exact)
            if exact:
                saver.save(Contents(2, False, {"actor": actor.engine}, {}))
                if rank == 0:
                    assert_equal_checkpoints(directory / "step_000002", again / "step_000002")
            dist.barrier()
    return loaded


def _is_their_turn(own: Path, saved: Path) -> bool:
    """Whether this optimizer of a layout takes that optimizer's checkpoint of another layout.

    To save time, the two optimizers of each layout take turns on both sides.
    """
    layouts = sorted({_layout_of(directory) for directory in saved.parent.iterdir()})
    turn = layouts.index(_layout_of(own)) + layouts.index(_layout_of(saved))
    turn += list(CASES).index(saved.parent.name)
    plain = [directory.name.endswith(PLAIN.name) for directory in (own, saved)]
    return plain == [turn % 2 == 1, turn // 2 % 2 == 1]


def _layout_of(directory: Path) -> str:
    """The name of the layout in that of a directory."""
    return directory.name.rpartition("-")[0]


def _empty_actor(setting: Setting, case: Case) -> Actor:
    """An actor whose trained weights are 0, so that nothing but the checkpoint can fill them."""
    actor = build_actor(setting, case, **(OFFLOADED if case in EXPERTS.values() else {}))
    with actor.engine.residency.needing("params"):
        for chunk in actor.engine.chunks:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.data.zero_()
    return actor


# In bfloat16 it is 0.05. Muon lifts the smallest directions of a gradient, which bfloat16 has
# rounded; in float32 the layouts differ by less than 0.001.
_TOLERANCES = {"float32": 2e-5, "experts": 2e-5, "muon": 0.15}


def _assert_metrics_near(
    metrics: dict[str, Any], wanted: dict[str, Any], dtype: str, exact: bool
) -> None:
    metrics = _without_layout(metrics)
    wanted = _without_layout(wanted)
    assert metrics.keys() == wanted.keys()
    tolerance = 0.0 if exact else _TOLERANCES.get(dtype, 0.05)
    for name, value in metrics.items():
        near = pytest.approx(wanted[name], rel=tolerance, abs=tolerance)
        assert value == near, f"{name}: {value!r} where {wanted[name]!r} is wanted, {dtype}"


def _assert_bytes_as_planned(actor: Actor) -> None:
    """Main weights, one moment of matrices and two of all else, where no vocabulary is padded."""
    engine = actor.engine
    layout = engine.groups.layout
    if layout.tp == layout.pp == 1:
        planned = training_bytes(engine.spec, layout, 2, splits_optimizer=False, is_muon=True)
        assert engine.residency.nbytes["optimizer"] == planned.optimizer


def _without_layout(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics less what measures the layout itself."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_a_weight_that_lands_in_another_place_is_seen(saved_by: Callable[..., Path]) -> None:
    run_ranks(2, _load_with_a_shift, saved_by(2))


def _load_with_a_shift(rank: int, world_size: int, root: Path) -> None:
    """Every number is stored one place too late; the comparison of this file must fail."""
    (dtype, case, setting), *_ = _all_settings(root, world_size)
    saved = _directory(root, dtype, setting)
    again = root / "again" / "shifted"
    right = SliceReader.fill

    def shifted(reader: SliceReader, *arguments: Any) -> None:
        right(reader, *arguments)
        target = arguments[4]
        target.copy_(target.roll(1))

    actor = _empty_actor(setting, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SliceReader, "fill", shifted)
        open_checkpoint(saved / "step_000001", everyone()).load_models({"actor": actor.engine})
    _saver(again, asynchronous=False).save(Contents(1, False, {"actor": actor.engine}, {}))
    if rank == 0:
        with pytest.raises(AssertionError):
            assert_equal_checkpoints(saved / "step_000001", again / "step_000001")
    dist.barrier()


def test_a_checkpoint_of_another_optimizer_is_refused(saved_by: Callable[..., Path]) -> None:
    run_ranks(2, _load_with_another_optimizer, saved_by(2))


def _load_with_another_optimizer(rank: int, world_size: int, root: Path) -> None:
    (_, case, setting), *_ = _all_settings(root, world_size)
    checkpoint = open_checkpoint(_directory(root, "float32", setting) / "step_000001", everyone())
    other = build_actor(setting, replace(case, optimizer="muon"))
    with pytest.raises(CheckpointError, match=r"optim\.name adamw for actor.*set it to adamw"):
        checkpoint.load_models({"actor": other.engine})

    checkpoint = open_checkpoint(_directory(root, "muon", setting) / "step_000001", everyone())
    other = build_actor(setting, replace(CASES["muon"], optimizer="adamw"))
    with pytest.raises(CheckpointError, match=r"optim\.name muon for actor.*set it to muon"):
        checkpoint.load_models({"actor": other.engine})


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused(saved_by: Callable[..., Path]) -> None:
    (message,) = run_ranks(1, _load_another_model, saved_by(*LAYOUTS))
    assert "holds another model as actor" in message and "missing" in message


def _load_another_model(rank: int, world_size: int, root: Path) -> str:
    (_, _, setting), *_ = _all_settings(root, 1)
    checkpoint = open_checkpoint(_directory(root, "float32", setting) / "step_000001", everyone())
    other = build_actor(setting, Case("llama", "token-mean"))
    with pytest.raises(CheckpointError) as refusal:
        checkpoint.load_models({"actor": other.engine})
    return str(refusal.value)


def test_a_critic_begins_with_the_state_of_the_run_that_trained_it(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama"])
    run_ranks(2, _warm_start_elsewhere, tmp_path)


def _warm_start_elsewhere(rank: int, world_size: int, root: Path) -> None:
    """A critic is trained and saved, and goes on in another layout as it would have."""
    case = Case("llama", "token-mean")
    run = root / "run"
    saved = run / "checkpoints"
    experience = load_experience(root, case)
    trained, *others = settings(root, 2, (SHARDED, PLAIN), LAYOUTS)

    critic = build_critic(trained, case)
    cut = cut_responses(critic, experience.rollout, plain_ppo.MINI_BATCH)
    critic.update(experience, cut)
    state = {"models": {"model": critic.engine.state_dict()}}
    _saver(saved, False).save(Contents(1, False, {"model": critic.engine}, state))
    assert critic_beside(run / "model") == (saved / "step_000001", "model")
    wanted = _without_layout(critic.update(experience, cut))

    for number, setting in enumerate([trained, *others]):
        other = build_critic(setting, case)
        warm_start(other.engine, run / "model")
        assert other.engine.state_dict() == state["models"]["model"] != critic.engine.state_dict()
        again = root / f"again_{number}"
        _saver(again, False).save(Contents(1, False, {"model": other.engine}, {}))
        if rank == 0:
            assert_equal_checkpoints(saved / "step_000001", again / "step_000001", "model")
        cut = cut_responses(other, experience.rollout, plain_ppo.MINI_BATCH)
        _assert_metrics_near(other.update(experience, cut), wanted, "float32", number == 0)

    with pytest.raises(CheckpointError, match=r"elsewhere has no whole checkpoint of a critic"):
        warm_start(critic.engine, root / "elsewhere" / "model")
