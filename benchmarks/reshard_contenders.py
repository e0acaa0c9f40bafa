"""The ways to bring training weights into an engine that `reshard.py` compares.

Each is built from a `Case` and is run by one call. This file measures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.device import Device
from mrlhf.inference.native.parameters import Parameters
from mrlhf.models.build import BuiltModel, build_model
from mrlhf.models.parameters import parameter_names, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import connect, exchange
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.execute import Resharder, TransferOptions
from mrlhf.reshard.moves import Move
from mrlhf.reshard.plan import Planner, ReshardPlan
from mrlhf.reshard.sides import Side
from mrlhf.reshard.views import Views
from mrlhf.weights.shard import Piece, Slot

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """What every contender is built for, on this rank."""

    spec: ModelSpec  # the model
    device: Device  # the device of this rank
    dtype: torch.dtype  # dtype of the weights on both sides
    rank: int  # global rank of this process
    groups: RoleGroups  # the process groups of the training layout
    engines: EngineLayout  # the layout of the engine
    module: Any  # the training model
    source: list[Slot]  # where the training weights are stored
    planner: Planner  # plans our way from the training layout to the engine's


@dataclass(frozen=True)
class Contender:
    """One way to bring the weights into an engine."""

    run: Callable[[], Any]  # brings all weights in once
    # what it fills; None if its result is not compared with that of others
    engine: Engine | None = None


def make_contenders(case: Case, factory: GroupFactory) -> dict[str, Contender]:
    """All contenders by name; "ours" returns `ReshardStats`. Every rank calls it."""
    ours_engine = Engine(case)
    gathered_engine = Engine(case)

    flat = FlatMessages.of(case.planner.plan(case.rank), case.device.torch_device)
    connect(None, case.device.torch_device)
    pairs = [(buffer, torch.ones_like(buffer)) for _, buffer in flat.receives]

    return {
        "ours": Contender(_resharder(case, ours_engine).run, ours_engine),
        "full gather": Contender(FullGather(case, gathered_engine).run, gathered_engine),
        "megatron": Contender(_megatron(case, factory)),
        "flat send": Contender(flat.send),
        "memcpy": Contender(partial(_copy_all, pairs)),
    }


def new_model(
    spec: ModelSpec, groups: RoleGroups, device: Device, dtype: torch.dtype
) -> BuiltModel:
    """Build this rank's part of a model in the layout of `groups`."""
    return build_model(
        spec, groups, dtype=dtype, device=device, sequence_parallel=False, recompute="none"
    )


class Engine:
    """The native engine's weights, which a reshard fills."""

    def __init__(self, case: Case) -> None:
        place = case.engines.place_in_replica(case.rank)
        self._parameters = Parameters(case.spec, place, case.device.torch_device, case.dtype)
        self.bind = self._parameters.bind
        self.weight_slots = self._parameters.slots

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces of each parameter."""
        return self._parameters.pieces


def _resharder(case: Case, engine: Engine) -> Resharder:
    options = TransferOptions(BUCKET_BYTES)
    return Resharder(
        case.planner, case.source, engine, case.rank, options, case.groups.collection.mp
    )


class FullGather:
    """Gathers one whole parameter at a time on every rank and copies what the engine needs."""

    def __init__(self, case: Case, engine: Engine) -> None:
        groups = case.groups
        target = engine.weight_slots()
        self._groups = groups
        self._stored = {slot.piece.parameter: slot.parameter.detach() for slot in case.source}
        self._target = {slot.piece.key: slot for slot in target}

        self._steps: list[tuple[int, str, list[Piece]]] = []
        for stage in range(groups.layout.pp):
            self._steps += _steps_of_stage(case.spec, groups, stage)

        needed = [slot.piece for slot in target]
        self._copies = [_copies(needed, pieces, case.rank) for _, _, pieces in self._steps]
        self._shapes = self._gather_shapes()

    def _gather_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each step's parameter, which only the ranks of its stage know."""
        own: list[Any] = []
        for owner, name, _ in self._steps:
            own.append(tuple(self._stored[name].shape) if owner == dist.get_rank() else None)

        of_stages: list[Any] = [None] * dist.get_world_size(self._groups.pp)
        dist.all_gather_object(of_stages, own, group=self._groups.pp)

        shapes = []
        for candidates in zip(*of_stages, strict=True):
            (shape,) = (shape for shape in candidates if shape is not None)
            shapes.append(shape)
        return shapes

    @torch.no_grad()
    def run(self) -> None:
        """Gather and copy everything once."""
        like = next(iter(self._stored.values()))
        tp = self._groups.layout.tp
        pp = self._groups.layout.pp

        for (owner, name, pieces), shape, copies in zip(
            self._steps, self._shapes, self._copies, strict=True
        ):
            shard = self._stored[name] if owner == dist.get_rank() else like.new_empty(shape)
            if pp > 1:
                dist.broadcast(shard, owner, group=self._groups.pp)

            shards = [shard]
            if tp > 1:
                shards = [torch.empty_like(shard) for _ in range(tp)]
                dist.all_gather(shards, shard, group=self._groups.tp)

            slots = [Slot(piece, shards[int(piece.parameter)]) for piece in pieces]
            views = Views(slots, {}, like.dtype)
            for copy in copies:
                view = self._target[copy.target.key].view(copy.start, copy.stop)
                view.copy_(views(copy.source, copy.start, copy.stop).reshape(view.shape))


def _steps_of_stage(
    spec: ModelSpec, groups: RoleGroups, stage: int
) -> list[tuple[int, str, list[Piece]]]:
    """For each parameter of a stage: the rank that broadcasts it, its name, and its pieces.

    `Piece.parameter` is the tensor-parallel rank whose shard holds the piece.
    """
    layout = groups.layout
    coordinates = groups.coordinates
    pieces: dict[str, dict[Any, Piece]] = {}
    for tp in range(layout.tp):
        for piece in role_pieces(spec, layout, layout.rank_at(tp=tp, dp=coordinates.dp, pp=stage)):
            pieces.setdefault(piece.parameter, {})[piece.key] = piece._replace(parameter=str(tp))

    owner = layout.rank_at(tp=coordinates.tp, dp=coordinates.dp, pp=stage)
    names = parameter_names(spec, layout, layout.coordinates(owner))
    if spec.output_is_embedding and layout.pp > 1:  # the last stage's copy of the embedding
        names = [name for name in names if name != "output_layer.weight"]

    return [(owner, name, list(pieces[name].values())) for name in names]


def _copies(needed: list[Piece], held: list[Piece], rank: int) -> list[Move]:
    """What to copy from the gathered pieces.

    The plan would share some of them, but they are thrown away, so those are copied too.
    """
    by_key = {piece.key: piece for piece in held}
    names = {piece.name for piece in held}
    wanted = [piece for piece in needed if piece.name in names]
    local_plan = Planner([(_alone(rank, held), _alone(rank, wanted))], itemsize=1).plan(rank)

    copies = list(local_plan.copies)
    for alias in local_plan.aliases:
        for piece in alias.pieces:
            source = by_key[piece.key]
            copies.append(Move(rank, rank, source, piece, piece.start, piece.stop))
    return copies


def _alone(rank: int, pieces: list[Piece]) -> Side:
    """A side of one rank."""
    return Side(1, range(1), lambda _: (0, 0), lambda *_: rank, lambda _: pieces)


@dataclass
class FlatMessages:
    """As many bytes as had to move, in flat buffers."""

    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]

    @classmethod
    def of(cls, plan: ReshardPlan, device: torch.device) -> FlatMessages:
        """Buffers for the plan of this rank."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for move in plan.sends:
            sent[move.target_rank] += move.elements * plan.itemsize
        for move in plan.receives:
            received[move.source_rank] += move.elements * plan.itemsize

        ones = partial(torch.ones, dtype=torch.uint8, device=device)
        return cls(
            [(peer, ones(size)) for peer, size in sent.items()],
            [(peer, ones(size)) for peer, size in received.items()],
        )

    def send(self) -> None:
        """All messages at once."""
        exchange(self.sends, self.receives)


def _megatron(case: Case, factory: GroupFactory) -> Callable[[], None]:
    """Megatron-core's resharding, into another model in the engine's layout."""
    from megatron.core.resharding.refit import swap_model_weights
    from megatron.core.utils import unwrap_model

    tp = case.engines.tp
    groups = factory.role_groups(ParallelLayout(tp=tp, pp=1, dp=dist.get_world_size() // tp))
    built = new_model(case.spec, groups, case.device, case.dtype)
    source = unwrap_model(case.module)
    target = unwrap_model(built.chunks[0])
    backend = "nccl" if case.device.kind == "cuda" else "gloo"
    return lambda: swap_model_weights(source, target, backend)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)
