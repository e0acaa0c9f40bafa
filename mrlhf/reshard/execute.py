"""Carries out a reshard plan on one rank: shares what coincides, copies what is here, sends and
receives the rest.

Slices travel in flat buckets of bounded size and are unpacked straight into the engine's own
storage; no full tensor is ever gathered. Ranks of one machine that compute on the CPU share the
buckets; others send them over `torch.distributed`. This file knows slots and ranks; it does not
know models, layouts or what the engine does with its weights.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.parallel.collectives import connect, exchange
from mrlhf.reshard.links import LinkBuckets, links_of
from mrlhf.reshard.plan import ReshardPlan
from mrlhf.reshard.shared_memory import SharedRings
from mrlhf.reshard.views import Places, Views
from mrlhf.weights.shard import Piece, Slot

logger = logging.getLogger(__name__)


class Carrier(Protocol):
    """What takes moves from rank to rank."""

    @property
    def peak_bytes(self) -> int:
        """Memory of this rank's buckets while moves are under way."""

    def carry(self, source: Views, target: Views, work: Iterator[None]) -> int:
        """Make all moves, do all of `work` where it holds up least, and return the bytes received."""


class WeightHolder(Protocol):
    """What an inference engine offers for its weights to be filled."""

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces that make up each parameter."""

    def bind(self, parameter: str, tensor: Tensor) -> None:
        """Use `tensor` itself as `parameter`."""

    def weight_slots(self) -> list[Slot]:
        """Where each piece is stored, for all parameters."""


@dataclass(frozen=True)
class ReshardStats:
    """What one reshard cost this rank.

    Attributes:
        bytes_moved: bytes received from other ranks.
        bytes_had_to_move: bytes that this rank needed and did not hold.
        peak_extra_bytes: bytes of the buckets.
        seconds: from the first slice to the last, with what was done meanwhile, verification
            excepted.
    """

    bytes_moved: int
    bytes_had_to_move: int
    peak_extra_bytes: int
    seconds: float


class Resharder:
    """Brings one rank's training weights into the engine on that rank, as often as they change."""

    def __init__(
        self,
        plan: ReshardPlan,
        source_slots: Sequence[Slot],
        engine: WeightHolder,
        rank: int,
        bucket_bytes: int,
        verify: bool = False,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        shared_memory: bool = True,
    ) -> None:
        """Every rank of the group constructs one, from the same plan.

        Args:
            plan: from the layout of `source_slots` to the engine's.
            source_slots: where this rank's training weights are stored.
            engine: the engine on this rank.
            rank: global rank of this process.
            bucket_bytes: bound on the memory of this rank's buckets, sent and received, unless one
                row of a tensor is larger.
            verify: after each run, compare checksums of every slice as it is stored on both sides.
            group: the ranks of the plan, and maybe more; all ranks of the job where None.
            timeout_s: seconds that a rank waits for another one's weights.
            shared_memory: share the buckets where all ranks of the group are on one machine and
                compute on its CPU.
        """
        pieces = engine.parameter_pieces()
        self._aliases = [alias for alias in plan.aliases if alias.rank == rank]
        assert all(pieces[alias.parameter] == alias.pieces for alias in self._aliases), (
            "the plan is of another engine"
        )
        self._source_slots, self._engine = source_slots, engine
        self._parameters = {slot.piece.key: slot.parameter for slot in source_slots}
        self._source_places: Places = {}
        self._target_places: Places = {}
        self._copies = [copy for copy in plan.copies if copy.target_rank == rank]
        self._links = {ends: moves for ends, moves in links_of(plan.moves).items() if rank in ends}
        self._rank, self._minimum, self._verify, self._group = (
            rank,
            plan.minimum[rank],
            verify,
            group,
        )
        self._dtype, self._device = (
            source_slots[0].parameter.dtype,
            source_slots[0].parameter.device,
        )
        assert self._dtype.itemsize == plan.itemsize, "the plan is of another dtype"
        assert all(slot.parameter.dtype == self._dtype for slot in source_slots), (
            "the parameters have several dtypes"
        )
        self._under_way = False
        self.carrier: Carrier | None = None
        if plan.moves:
            connect(group, self._device)
            rings = SharedRings(plan.moves, rank, bucket_bytes, self._dtype, timeout_s)
            if shared_memory and self._device.type == "cpu" and rings.open(group):
                self.carrier = rings
            else:
                if shared_memory and self._device.type == "cpu" and rank == min(plan.minimum):
                    logger.warning(
                        "ranks %s share no memory (several machines, or too little room in /dev/shm: give a container "
                        "more with --shm-size), so weights travel over gloo, which is slower",
                        sorted(plan.minimum),
                    )
                self.carrier = LinkBuckets(
                    plan.moves, rank, bucket_bytes, self._dtype, self._device, group
                )

    @torch.no_grad()
    def run(self, meanwhile: Callable[[], None] | None = None) -> ReshardStats:
        """Make the engine's weights those of the training model; every rank of the group calls it.

        Args:
            meanwhile: what this rank can do while weights are under way, such as allocating the KV
                cache; it must not touch the engine's weights.

        Raises:
            WeightError: `verify` is on and a slice did not arrive as it was sent, a rank did not
                come, or an earlier run failed half-way: what ranks then have of each other's
                messages is of no use.
        """
        if self._under_way:
            raise WeightError(
                "an earlier hand-over of weights failed half-way on this rank; start the job again"
            )
        self._under_way = True
        began = self._now()
        for alias in self._aliases:
            self._engine.bind(alias.parameter, self._parameters[alias.pieces[0].key].detach())
        slots = self._engine.weight_slots()
        assert all(slot.parameter.dtype == self._dtype for slot in slots), (
            "the engine has another dtype"
        )
        source = Views(self._source_slots, self._source_places)
        target = Views(slots, self._target_places)

        work = self._work_here(source, target, meanwhile)
        if self.carrier is None:
            moved, peak = sum(0 for _ in work), 0
        else:
            moved, peak = self.carrier.carry(source, target, work), self.carrier.peak_bytes
        seconds = self._now() - began
        self._under_way = False
        if self._verify:
            self._compare(source, target)
        return ReshardStats(moved, self._minimum, peak, seconds)

    def _work_here(
        self, source: Views, target: Views, meanwhile: Callable[[], None] | None
    ) -> Iterator[None]:
        """What needs no other rank, in steps."""
        if meanwhile is not None:
            meanwhile()
        for copy in self._copies:
            view = target(copy.target, copy.start, copy.stop)
            view.copy_(source(copy.source, copy.start, copy.stop).reshape(view.shape))
            yield

    def _compare(self, source: Views, target: Views) -> None:
        """Compare each slice as its source stores it with the same slice as the engine stores it."""
        told, heard, arrived = [], [], []
        for (by, to), moves in self._links.items():
            if by == self._rank:
                sums = _checksums([source(move.source, move.start, move.stop) for move in moves])
                told.append((to, sums.to(self._device)))
            else:
                heard.append(
                    (by, torch.empty((len(moves), 2), dtype=torch.int64, device=self._device))
                )
                arrived += moves
        exchange(told, heard, self._group)
        here = [source(copy.source, copy.start, copy.stop) for copy in self._copies]
        expected = torch.cat([_checksums(here), *(sums.cpu() for _, sums in heard)])
        slices = [*self._copies, *arrived]
        found = _checksums([target(move.target, move.start, move.stop) for move in slices])
        wrong = [
            move
            for move, same in zip(slices, (found == expected).all(dim=1).tolist(), strict=True)
            if not same
        ]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise WeightError(
                f"reshard changed bytes of {wrong[0]}{more}; check the link and the memory of both ranks"
            )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _checksums(views: Sequence[Tensor]) -> Tensor:
    """Sum and CRC-32 of the bytes of each slice, [slices, 2], on the host."""
    found = torch.empty((len(views), 2), dtype=torch.int64)
    for number, view in enumerate(views):
        stored = view.contiguous().view(-1).view(torch.uint8).cpu()
        found[number, 0] = stored.sum(dtype=torch.int64)
        found[number, 1] = zlib.crc32(stored.numpy().tobytes())
    return found
