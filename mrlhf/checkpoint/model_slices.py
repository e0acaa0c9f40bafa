"""The slices of a model that a rank writes into a checkpoint, and those that it reads from one.

Every element of a weight is written by one rank. With the distributed optimizer that is the rank
that updates it; otherwise the ranks with the same weights share the work. Moments stand beside the
weights, in the same boxes. When loading, a rank reads the boxes that overlap its own, whoever wrote
them. This file does not know roles, schedules or directories.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.manifest import (
    WEIGHT,
    Manifest,
    StoredModel,
    check_sizes,
    read_manifest,
    slice_key,
)
from mrlhf.checkpoint.slice_reader import SliceReader, check_shapes
from mrlhf.checkpoint.tensor_file import TensorSource
from mrlhf.errors import CheckpointError
from mrlhf.models.parameters import role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import together
from mrlhf.parallel.layout import REPLICA_AXES, ParallelLayout
from mrlhf.training.engine import ModelEngine
from mrlhf.training.optimizer import OptimizedRange, ShardedOptimizer
from mrlhf.training.optimizer_states import ADAM_MOMENTS, MOMENTUM
from mrlhf.weights.boxes import Box, StoredBox, boxes_in
from mrlhf.weights.shard import Key, Piece


@dataclass(frozen=True)
class RankSlices:
    """The numbers that one rank writes of one model."""

    kinds: tuple[str, ...]  # the numbers stored of an element; not all are of each tensor
    optimizer_steps: int  # behind the moments, as far as this rank knows
    boxes: list[Box]  # in the order of the file
    sources: list[TensorSource]  # the tensors of the file


@dataclass(frozen=True)
class _HeldParameter:
    """One parameter of this rank."""

    parameter: Tensor
    pieces: list[Piece]  # the named slices that it holds
    optimized: OptimizedRange | None  # the part of it that this rank's optimizer holds

    @property
    def flats(self) -> dict[str, Tensor]:
        """The flat tensors of the part that this rank's optimizer holds, by kind."""
        assert self.optimized is not None
        return {WEIGHT: self.optimized.main, **self.optimized.moments}


def slices_to_save(engine: ModelEngine) -> RankSlices:
    """This rank's share of a model that is trained; no rank waits for another."""
    assert engine.optimizer is not None, "a frozen model is not saved"
    layout = engine.groups.layout
    place = engine.groups.coordinates
    rank = torch.distributed.get_rank()
    own_keys = _keys_to_write(engine.spec, layout, rank)
    replicas = layout.group_size(*REPLICA_AXES)
    _, replica = layout.place(rank, *REPLICA_AXES)

    boxes: list[Box] = []
    sources: list[TensorSource] = []
    kinds = {WEIGHT: None}  # in the order in which they are met
    for held in _held(engine):
        is_trained = held.parameter.requires_grad
        if not is_trained:
            held = replace(held, optimized=_untrained(held.parameter, engine.optimizer))
        if held.optimized is None:
            continue

        if engine.optimizer.is_distributed and is_trained:
            start = held.optimized.start
            flats = held.flats
        elif held.pieces[0].of_expert:
            start, flats = _share(held, layout.edp, place.edp)
        else:
            start, flats = _share(held, replicas, replica)
        kinds |= dict.fromkeys(flats)
        stop = start + len(flats[WEIGHT])

        for piece in held.pieces:
            if piece.key not in own_keys:
                continue
            for stored in boxes_in(piece, tuple(held.parameter.shape), start, stop):
                boxes.append(stored.box)
                for kind, flat in flats.items():
                    sources.append(_source(kind, flat, stored, start))
    return RankSlices(tuple(kinds), engine.optimizer.steps_taken, boxes, sources)


def load_slices(engine: ModelEngine, directory: Path, manifest: Manifest, role: str) -> None:
    """Fill a model, its main weights and its moments from a checkpoint of any layout.

    The engine has its optimizer; `role` is the model's name in the checkpoint. A CheckpointError
    says that the checkpoint's tensors are not the model's.
    """
    assert engine.optimizer is not None, "a frozen model is not loaded"
    model = manifest.models[role]
    check_shapes(directory, role, model, engine.trained_shapes)
    _check_optimizer(directory, role, model, engine.optimizer)
    with engine.residency.needing("params", "optimizer"):
        engine.residency.forget_copies()  # a router's correction has no gradient, and is read too
        _fill(engine, SliceReader(directory, manifest), role)


def policy_in(manifest: Manifest) -> str | None:
    """The name of the policy in a checkpoint; None if it holds none."""
    policies = (role for role, model in manifest.models.items() if model.head == "lm")
    return next(policies, None)


def load_policy(engine: ModelEngine, directory: Path) -> None:
    """Fill a model that is not trained with the policy of a checkpoint; every rank calls it.

    A CheckpointError says that the checkpoint's tensors are not the model's.
    """
    with together(CheckpointError, engine.groups.world):
        manifest = read_manifest(directory)
        check_sizes(directory, manifest.files)
        role = policy_in(manifest)
        assert role is not None
        check_shapes(directory, role, manifest.models[role], engine.trained_shapes)
        reader = SliceReader(directory, manifest)
        with engine.residency.needing("params"):
            engine.residency.forget_copies()
            for parameter, pieces in _parameters(engine):
                flat = parameter.detach().view(-1)
                reader.fill(role, WEIGHT, pieces, tuple(parameter.shape), flat, 0)


def _check_optimizer(
    directory: Path, role: str, model: StoredModel, optimizer: ShardedOptimizer
) -> None:
    """Refuse, with a CheckpointError, the moments of another optimizer."""
    stored = "muon" if MOMENTUM in model.kinds else "adamw"
    if len(model.kinds) > 1 and stored != optimizer.name:
        raise CheckpointError(
            f"{directory} holds the moments of optim.name {stored} for {role}, and this run has "
            f"optim.name {optimizer.name}; set it to {stored}, or begin a new run with the "
            "exported model as its path"
        )


def _fill(engine: ModelEngine, reader: SliceReader, role: str) -> None:
    """Fill a model that is on the device."""
    assert engine.optimizer is not None
    model = reader.manifest.models[role]
    has_moments = len(model.kinds) > 1
    engine.optimizer.make_moments(model.optimizer_steps if has_moments else 0)

    for held in _held(engine):
        flat = held.parameter.detach().view(-1)
        reader.fill(role, WEIGHT, held.pieces, tuple(held.parameter.shape), flat, 0)
        if held.optimized is None:
            continue

        targets = dict(held.optimized.moments) if has_moments else {}
        if held.parameter.dtype != torch.float32:
            targets[WEIGHT] = held.optimized.main
        for kind, target in targets.items():
            shape = tuple(held.parameter.shape)
            reader.fill(role, kind, held.pieces, shape, target, held.optimized.start)


def _held(engine: ModelEngine) -> Iterator[_HeldParameter]:
    """This rank's parameters that training changes, each with its pieces."""
    assert engine.optimizer is not None
    held = _parameters(engine)
    ranges = engine.optimizer.ranges([parameter for parameter, _ in held])
    for (parameter, pieces), optimized in zip(held, ranges, strict=True):
        yield _HeldParameter(parameter, pieces, optimized)


def _parameters(engine: ModelEngine) -> list[tuple[Tensor, list[Piece]]]:
    """This rank's parameters that a checkpoint holds, each with its pieces."""
    found: dict[int, tuple[Tensor, list[Piece]]] = {}
    trained = engine.trained_shapes
    for slot in engine.slots:
        if slot.piece.name in trained:
            _, pieces = found.setdefault(id(slot.parameter), (slot.parameter, []))
            pieces.append(slot.piece)
    return list(found.values())


def _keys_to_write(spec: ModelSpec, layout: ParallelLayout, rank: int) -> set[Key]:
    """The named slices that this rank writes, of those that ranks of its replica hold."""
    mine = layout.coordinates(rank)
    own = {piece.key for piece in role_pieces(spec, layout, rank)}
    dense = {piece.key for piece in role_pieces(spec, layout, rank) if not piece.of_expert}
    # Tensor-parallel ranks hold the same norms, and the two ends of a pipeline the same tied
    # embedding. The first rank that holds such a slice writes it. Only ranks of other replicas hold
    # the same slice of an expert.
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            if (pp, tp) < (mine.pp, mine.tp):
                earlier = layout.rank_at(tp=tp, cp=mine.cp, dp=mine.dp, pp=pp)
                own -= dense & {piece.key for piece in role_pieces(spec, layout, earlier)}
    return own


def _untrained(parameter: Tensor, optimizer: ShardedOptimizer) -> OptimizedRange:
    """The range of a parameter that the optimizer does not have, as if it had never moved."""
    flat = parameter.detach().float().view(-1)
    names = ADAM_MOMENTS if optimizer.steps_taken else ()
    return OptimizedRange(0, flat, {name: torch.zeros_like(flat) for name in names})


def _share(held: _HeldParameter, replicas: int, replica: int) -> tuple[int, dict[str, Tensor]]:
    """The first element and the tensors of this rank's part of a parameter of `replicas` ranks."""
    rows = held.parameter.shape[0]
    columns = held.parameter.numel() // rows
    begin = rows * replica // replicas * columns
    end = rows * (replica + 1) // replicas * columns
    return begin, {kind: flat[begin:end] for kind, flat in held.flats.items()}


def _source(kind: str, flat: Tensor, stored: StoredBox, start: int) -> TensorSource:
    def runs() -> Iterable[Tensor]:
        return (flat[begin - start : end - start] for begin, end in stored.runs)

    return TensorSource(slice_key(kind, stored.box), flat.dtype, stored.box.shape, runs)
