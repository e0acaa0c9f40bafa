"""Carries out a reshard plan on one rank: shares what coincides, copies what is here, sends and receives the rest.

Slices travel in flat buckets of bounded size, one for each pair of ranks at a time, and are unpacked straight into
the engine's own storage; no full tensor is ever gathered. It knows slots and ranks; it does not know models, layouts
or what the engine does with its weights.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.parallel.collectives import Peer, connect, exchange
from mrlhf.reshard.plan import Move, ReshardPlan, split
from mrlhf.weights.shard import Piece, Slot

Transport = Callable[[Sequence[Peer], Sequence[Peer], dist.ProcessGroup | None], None]
Bucket = list[Move]
Slots = dict[tuple[str, int, int, int], Slot]


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
        seconds: from the first slice to the last, verification excepted.
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
        transport: Transport = exchange,
    ) -> None:
        """Every rank of the group constructs one, from the same plan.

        Args:
            plan: from the layout of `source_slots` to the engine's.
            source_slots: where this rank's training weights are stored.
            engine: the engine on this rank.
            rank: global rank of this process.
            bucket_bytes: bound on all buckets that this rank sends from, and again on those that it receives into,
                unless one row of a tensor is larger.
            verify: after each run, compare checksums of every slice as it is stored on both sides.
            group: the ranks of the plan, and maybe more; all ranks of the job where None.
            transport: what carries the buckets.
        """
        pieces = engine.parameter_pieces()
        self._aliases = [alias for alias in plan.aliases if alias.rank == rank]
        assert all(pieces[alias.parameter] == alias.pieces for alias in self._aliases), "the plan is of another engine"
        self._source: Slots = {slot.piece.key: slot for slot in source_slots}
        self._copies = [copy for copy in plan.copies if copy.target_rank == rank]
        self._engine = engine
        self._minimum = plan.minimum[rank]
        self._verify, self._group, self._transport = verify, group, transport
        self._dtype, self._device = source_slots[0].parameter.dtype, source_slots[0].parameter.device
        assert self._dtype.itemsize == plan.itemsize, "the plan is of another dtype"
        assert all(slot.parameter.dtype == self._dtype for slot in source_slots), "the parameters have several dtypes"
        links = _links(plan.moves)
        capacity = bucket_bytes // plan.itemsize // _most_peers(links)
        self._outgoing = {to: _buckets(moves, capacity) for (by, to), moves in links.items() if by == rank}
        self._incoming = {by: _buckets(moves, capacity) for (by, to), moves in links.items() if to == rank}
        if plan.moves:
            connect(group, self._device)

    @torch.no_grad()
    def run(self) -> ReshardStats:
        """Make the engine's weights those of the training model; every rank of the group calls it.

        Raises:
            WeightError: `verify` is on and a slice did not arrive as it was sent.
        """
        began = self._now()
        for alias in self._aliases:
            self._engine.bind(alias.parameter, self._source[alias.pieces[0].key].parameter.detach())
        target: Slots = {slot.piece.key: slot for slot in self._engine.weight_slots()}
        assert all(slot.parameter.dtype == self._dtype for slot in target.values()), "the engine has another dtype"
        for copy in self._copies:
            view = _target_view(target, copy)
            view.copy_(_source_view(self._source, copy).reshape(view.shape))
        sending, receiving = self._allocate(self._outgoing), self._allocate(self._incoming)
        rounds = max(map(len, [*self._outgoing.values(), *self._incoming.values()]), default=0)
        moved = sum(self._round(target, sending, receiving, number) for number in range(rounds))
        seconds = self._now() - began
        if self._verify:
            self._compare(target, rounds)
        peak = sum(buffer.nbytes for buffers in (sending, receiving) for buffer in buffers.values())
        return ReshardStats(moved, self._minimum, peak, seconds)

    def _round(self, target: Slots, sending: dict[int, Tensor], receiving: dict[int, Tensor], number: int) -> int:
        """Exchange bucket `number` with each peer that has one, and return the bytes received."""
        sends, receives = _of_round(self._outgoing, number), _of_round(self._incoming, number)
        for peer, bucket in sends.items():
            for move, flat in _parts(sending[peer], bucket):
                view = _source_view(self._source, move)
                flat.view(view.shape).copy_(view)
        filled = {peer: receiving[peer][: _elements(bucket)] for peer, bucket in receives.items()}
        self._transport(
            [(peer, sending[peer][: _elements(bucket)]) for peer, bucket in sends.items()],
            list(filled.items()),
            self._group,
        )
        for peer, bucket in receives.items():
            for move, flat in _parts(filled[peer], bucket):
                view = _target_view(target, move)
                view.copy_(flat.view(view.shape))
        return sum(buffer.nbytes for buffer in filled.values())

    def _compare(self, target: Slots, rounds: int) -> None:
        """Compare each slice as its source stores it with the same slice as the engine stores it."""
        pairs = [(copy, _checksums([_source_view(self._source, copy)])[0]) for copy in self._copies]
        for number in range(rounds):
            sends, receives = _of_round(self._outgoing, number), _of_round(self._incoming, number)
            told = [
                (peer, _checksums([_source_view(self._source, move) for move in bucket]).to(self._device))
                for peer, bucket in sends.items()
            ]
            heard = [
                (peer, torch.empty((len(bucket), 2), dtype=torch.int64, device=self._device))
                for peer, bucket in receives.items()
            ]
            exchange(told, heard, self._group)
            for (_, checksums), bucket in zip(heard, receives.values(), strict=True):
                pairs += zip(bucket, checksums.cpu(), strict=True)
        wrong = [move for move, sent in pairs if not torch.equal(sent, _checksums([_target_view(target, move)])[0])]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise WeightError(f"reshard changed bytes of {wrong[0]}{more}; check the link and the memory of both ranks")

    def _allocate(self, by_peer: dict[int, list[Bucket]]) -> dict[int, Tensor]:
        return {
            peer: torch.empty(max(_elements(bucket) for bucket in buckets), dtype=self._dtype, device=self._device)
            for peer, buckets in by_peer.items()
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _links(moves: Sequence[Move]) -> dict[tuple[int, int], list[Move]]:
    """The moves from one rank to another, for each pair that has any."""
    links: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        links.setdefault((move.source_rank, move.target_rank), []).append(move)
    return links


def _most_peers(links: Iterable[tuple[int, int]]) -> int:
    """The most ranks that any one rank sends to, or receives from; at least 1."""
    ends = list(zip(*links, strict=True))
    return max((max(Counter(end).values()) for end in ends), default=1)


def _buckets(moves: Sequence[Move], capacity: int) -> list[Bucket]:
    """The moves of one link in order, cut and gathered in buckets of at most `capacity` numbers where rows allow it."""
    buckets: list[Bucket] = [[]]
    filled = 0
    for part in (part for move in moves for part in split(move, capacity)):
        if buckets[-1] and filled + part.elements > capacity:
            buckets.append([])
            filled = 0
        buckets[-1].append(part)
        filled += part.elements
    return buckets


def _of_round(by_peer: dict[int, list[Bucket]], number: int) -> dict[int, Bucket]:
    return {peer: buckets[number] for peer, buckets in by_peer.items() if number < len(buckets)}


def _elements(bucket: Bucket) -> int:
    return sum(move.elements for move in bucket)


def _parts(flat: Tensor, bucket: Bucket) -> Iterator[tuple[Move, Tensor]]:
    """Each move of the bucket with its stretch of the flat buffer."""
    offset = 0
    for move in bucket:
        yield move, flat[offset : offset + move.elements]
        offset += move.elements


def _source_view(source: Slots, move: Move) -> Tensor:
    return source[move.source.key].view(move.start, move.stop)


def _target_view(target: Slots, move: Move) -> Tensor:
    return target[move.target.key].view(move.start, move.stop)


def _checksums(views: Sequence[Tensor]) -> Tensor:
    """Sum and CRC-32 of the bytes of each slice, [slices, 2], on the host."""
    found = []
    for view in views:
        stored = view.contiguous().view(-1).view(torch.uint8).cpu()
        found.append([int(stored.sum(dtype=torch.int64)), zlib.crc32(stored.numpy().tobytes())])
    return torch.tensor(found, dtype=torch.int64)
