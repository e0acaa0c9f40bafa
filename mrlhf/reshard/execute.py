"""Carries out a reshard plan on one rank: it shares, copies, sends and receives weights.

Slices travel in flat buckets of bounded size and are unpacked directly into the engine's own
storage; no full tensor is ever gathered. This file knows slots and ranks; it does not know models,
layouts or what the engine does with its weights.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.parallel.collectives import all_max, exchange
from mrlhf.reshard.links import LinkBuckets
from mrlhf.reshard.moves import Move
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.views import KnownViews, Views
from mrlhf.weights.shard import Piece, Slot


class WeightHolder(Protocol):
    """The methods by which an inference engine lets its weights be filled."""

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces that make up each parameter."""

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Use `tensor` itself, without a copy, as `parameter`."""

    def weight_slots(self) -> list[Slot]:
        """Where each piece is stored, for all parameters."""


@dataclass(frozen=True)
class TransferOptions:
    """Settings of the transfer of weights."""

    bucket_bytes: int  # bound on a rank's buckets, unless one row of a tensor is larger
    verify: bool = False  # compare checksums of every slice on both sides after each run


@dataclass(frozen=True)
class ReshardStats:
    """The cost of one reshard on this rank."""

    bytes_moved: int  # bytes received from other ranks
    bytes_had_to_move: int  # bytes that this rank needed and did not hold
    peak_extra_bytes: int  # bytes of the buckets
    seconds: float  # from the first slice to the last, without verification
    # the share of the adapters' sums that rounding lost in a merge; None: they were not merged
    merge_error: float | None = None

    def __add__(self, later: ReshardStats) -> ReshardStats:
        """The cost of one reshard after another; neither has merged."""
        return ReshardStats(
            self.bytes_moved + later.bytes_moved,
            self.bytes_had_to_move + later.bytes_had_to_move,
            max(self.peak_extra_bytes, later.peak_extra_bytes),
            self.seconds + later.seconds,
        )

    def reduced(self) -> ReshardStats:
        """The cost over all ranks: the sum of the bytes, and the most memory and seconds."""
        moved = torch.tensor([self.bytes_moved, self.bytes_had_to_move], dtype=torch.int64)
        most = torch.tensor([self.peak_extra_bytes, self.seconds], dtype=torch.float64)
        dist.all_reduce(moved)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        total, needed = moved.tolist()
        peak, seconds = most.tolist()
        return ReshardStats(total, needed, int(peak), seconds, self.merge_error)


class Resharder:
    """Brings the training weights into the engine on one rank, each time they have changed."""

    def __init__(
        self,
        planner: Planner,
        source_slots: Sequence[Slot],
        engine: WeightHolder,
        rank: int,
        options: TransferOptions,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Plan for this rank; every rank of the group constructs one.

        `planner` and `options` are equal on all ranks. `source_slots` say where this rank stores
        its training weights. `group` holds the ranks of the plan, and possibly more; None: all
        ranks of the job.
        """
        self._group = group
        self._options = options
        self._under_way = False

        self._source_slots = source_slots
        self._parameters = {slot.piece.key: slot.parameter for slot in source_slots}
        self._dtype = source_slots[0].parameter.dtype
        self._device = source_slots[0].parameter.device
        plan = planner.plan(rank)
        assert self._dtype.itemsize == plan.itemsize, "the plan is of another dtype"
        assert _fit(source_slots, self._dtype), "the parameters have several dtypes"

        self._engine = engine
        pieces = engine.parameter_pieces()
        for alias in plan.aliases:
            own = [piece.key for piece in pieces[alias.parameter]]
            assert own == [piece.key for piece in alias.pieces], "the plan is of another engine"

        self._plan = plan
        self._source_views: KnownViews = {}
        self._target_views: KnownViews = {}
        self.links = self._make_links()

    @property
    def shares(self) -> bool:
        """Whether the engine uses some of the training weights where they are."""
        return bool(self._plan.aliases)

    @torch.no_grad()
    def run(self, meanwhile: Callable[[], None] | None = None) -> ReshardStats:
        """Make the engine's weights those of the training model; every rank of the group calls it.

        `meanwhile` is work that this rank can do while weights are under way, such as allocating
        the KV cache; it must not touch the engine's weights.

        Raises:
            WeightError: `verify` is on and a slice did not arrive as it was sent, another rank did
                not call this in time, or an earlier run failed half-way. After such a failure the
                ranks may still have messages of the old run, so no later run can be trusted.
        """
        if self._under_way:
            raise WeightError(
                "an earlier hand-over of weights failed half-way on this rank; start the job again"
            )
        self._under_way = True
        start = self._now()

        for alias in self._plan.aliases:
            self._engine.bind(alias.parameter, self._parameters[alias.pieces[0].key].detach())
        slots = self._engine.weight_slots()
        assert _fit(slots, self._dtype), "the engine has another dtype"
        source = Views(self._source_slots, self._source_views, self._dtype)
        target = Views(slots, self._target_views, self._dtype)

        def work_alone() -> None:
            if meanwhile is not None:
                meanwhile()
            for copy in self._plan.copies:
                view = target(copy.target, copy.start, copy.stop)
                view.copy_(source(copy.source, copy.start, copy.stop).reshape(view.shape))

        bytes_moved = 0
        peak_bytes = 0
        if self.links is None:
            work_alone()
        else:
            bytes_moved = self.links.carry(source, target, work_alone)
            peak_bytes = self.links.peak_bytes
        seconds = self._now() - start
        self._under_way = False

        if self._options.verify:
            self._compare(source, target)
        return ReshardStats(bytes_moved, self._plan.bytes_minimum, peak_bytes, seconds)

    def _make_links(self) -> LinkBuckets | None:
        """The links that carry this rank's moves; None if no rank of the group has any moves."""
        plan = self._plan
        links = len(plan.sends_by_peer) + len(plan.receives_by_peer)
        # This also makes NCCL create the communicator for the exchange: all ranks must take part in
        # the first call of a group, but an exchange may leave some out.
        most_links = all_max(links, self._group, self._device)
        if not most_links:
            return None

        capacity = self._options.bucket_bytes // self._dtype.itemsize // most_links
        return LinkBuckets(plan, capacity, self._dtype, self._device, self._group)

    def _compare(self, source: Views, target: Views) -> None:
        """Compare the checksum of each slice on its source with its checksum in the engine."""
        sent_sums: list[tuple[int, Tensor]] = []
        received_sums: list[tuple[int, Tensor]] = []
        received_moves: list[Move] = []
        for receiver, moves in self._plan.sends_by_peer.items():
            sums = _checksums([source(move.source, move.start, move.stop) for move in moves])
            sent_sums.append((receiver, sums.to(self._device)))
        for sender, moves in self._plan.receives_by_peer.items():
            sums = torch.empty((len(moves), 2), dtype=torch.int64, device=self._device)
            received_sums.append((sender, sums))
            received_moves += moves
        exchange(sent_sums, received_sums, self._group)

        copies = self._plan.copies
        copied = [source(copy.source, copy.start, copy.stop) for copy in copies]
        expected = torch.cat([_checksums(copied), *(sums.cpu() for _, sums in received_sums)])
        slices = [*copies, *received_moves]
        stored = _checksums([target(move.target, move.start, move.stop) for move in slices])

        equal = (stored == expected).all(dim=1).tolist()
        wrong = [move for move, is_equal in zip(slices, equal, strict=True) if not is_equal]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise WeightError(
                f"reshard changed bytes of {wrong[0]}{more}; check the link and the memory of both "
                "ranks"
            )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _fit(slots: Sequence[Slot], dtype: torch.dtype) -> bool:
    """Whether all slots are of `dtype`, apart from tensors that always stay float32."""
    return {slot.parameter.dtype for slot in slots} <= {dtype, torch.float32}


def _checksums(views: Sequence[Tensor]) -> Tensor:
    """Sum and CRC-32 of the bytes of each slice, [slices, 2], on the host."""
    sums = torch.empty((len(views), 2), dtype=torch.int64)
    for number, view in enumerate(views):
        stored = view.contiguous().view(-1).view(torch.uint8).cpu()
        sums[number, 0] = stored.sum(dtype=torch.int64)
        # `Tensor.numpy` would bind the memory for ever, and what is offloaded has to leave it.
        sums[number, 1] = zlib.crc32(np.from_dlpack(stored).data)
    return sums
