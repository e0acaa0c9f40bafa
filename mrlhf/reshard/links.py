"""Carries moves over `torch.distributed`, with gloo or NCCL.

In each round one flat bucket travels between each pair of ranks. This file knows moves and views;
it does not know plans or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.collectives import finish_exchange, start_exchange
from mrlhf.reshard.moves import Move, split
from mrlhf.reshard.plan import ReshardPlan
from mrlhf.reshard.views import Views

Bucket = list[Move]


class LinkBuckets:
    """The buckets in which moves travel between this rank and the others, round by round."""

    def __init__(
        self,
        plan: ReshardPlan,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Cut the moves of this rank into buckets; all ranks have called a collective before.

        A bucket has at most `capacity` numbers, the same on all ranks, unless one row of a tensor
        is larger. `group` holds the ranks of the plan, and possibly more; None: all ranks of the
        job.
        """
        self._dtype = dtype
        self._device = device
        self._group = group

        sends = plan.sends_by_peer.items()
        receives = plan.receives_by_peer.items()
        self._outgoing = {peer: _buckets(moves, capacity) for peer, moves in sends}
        self._incoming = {peer: _buckets(moves, capacity) for peer, moves in receives}

        all_links = [*self._outgoing.values(), *self._incoming.values()]
        self._rounds = max(map(len, all_links), default=0)
        largest = [max(map(_elements, buckets)) for buckets in all_links]
        self.peak_bytes = dtype.itemsize * sum(largest)

    def carry(self, source: Views, target: Views, work: Callable[[], None]) -> int:
        """Make all moves, and return the bytes received; every rank of the group calls it.

        `source` are the slices to send, `target` those to receive. `work` is called once, while the
        first buckets are under way.
        """
        send_buffers = self._allocate(self._outgoing)
        receive_buffers = self._allocate(self._incoming)
        received_bytes = 0
        for number in range(self._rounds):
            sends = _of_round(self._outgoing, number)
            receives = _of_round(self._incoming, number)

            outgoing: list[tuple[int, Tensor]] = []
            for peer, bucket in sends.items():
                _pack(bucket, send_buffers[peer], source)
                outgoing.append((peer, send_buffers[peer][: _elements(bucket)]))
            incoming = [
                (peer, receive_buffers[peer][: _elements(bucket)])
                for peer, bucket in receives.items()
            ]
            under_way = start_exchange(outgoing, incoming, self._group)

            if number == 0:
                work()

            finish_exchange(under_way)
            for peer, flat in incoming:
                for move, packed in _parts(flat, receives[peer]):
                    view = target(move.target, move.start, move.stop)
                    view.copy_(packed.view(view.shape))
                received_bytes += flat.nbytes

        if not self._rounds:  # other ranks of the group have links
            work()
        return received_bytes

    def _allocate(self, by_peer: dict[int, list[Bucket]]) -> dict[int, Tensor]:
        return {
            peer: torch.empty(max(map(_elements, buckets)), dtype=self._dtype, device=self._device)
            for peer, buckets in by_peer.items()
        }


def _buckets(moves: Sequence[Move], capacity: int) -> list[Bucket]:
    """Cut the moves of a link, in order, into buckets of `capacity` numbers, or a single row."""
    buckets: list[Bucket] = [[]]
    filled = 0
    for move in moves:
        for part in split(move, capacity):
            if buckets[-1] and filled + part.elements > capacity:
                buckets.append([])
                filled = 0
            buckets[-1].append(part)
            filled += part.elements
    return buckets


def _of_round(by_peer: dict[int, list[Bucket]], number: int) -> dict[int, Bucket]:
    """The bucket of round `number` for each peer that has one."""
    return {peer: buckets[number] for peer, buckets in by_peer.items() if number < len(buckets)}


def _elements(bucket: Bucket) -> int:
    return sum(move.elements for move in bucket)


def _pack(bucket: Bucket, flat: Tensor, source: Views) -> None:
    """Copy the slices of the bucket into the flat buffer."""
    for move, packed in _parts(flat, bucket):
        view = source(move.source, move.start, move.stop)
        packed.view(view.shape).copy_(view)


def _parts(flat: Tensor, bucket: Bucket) -> Iterator[tuple[Move, Tensor]]:
    """Each move of the bucket with its part of the flat buffer."""
    offset = 0
    for move in bucket:
        yield move, flat[offset : offset + move.elements]
        offset += move.elements
