"""Carries moves over `torch.distributed`: one flat bucket for each pair of ranks at a time, over
gloo or NCCL.

It knows moves and views; it does not know plans, engines or which ranks share a machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.collectives import finish_exchange, start_exchange
from mrlhf.reshard.plan import Move, split
from mrlhf.reshard.views import Views

Bucket = list[Move]


class LinkBuckets:
    """Buckets in which the moves between this rank and each other travel, round by round."""

    def __init__(
        self,
        moves: Sequence[Move],
        rank: int,
        bucket_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Every rank of the group constructs one, from the same moves; `connect` has been called on
        the group.

        Args:
            moves: of all ranks.
            rank: global rank of this process.
            bucket_bytes: bound on the memory of all buckets of a rank, unless one row of a tensor
                is larger.
            dtype: of the numbers.
            device: where they are.
            group: the ranks of the moves, and maybe more; all ranks of the job where None.
        """
        self._dtype, self._device, self._group = dtype, device, group
        links = links_of(moves)
        ends = Counter(end for link in links for end in link)
        capacity = bucket_bytes // dtype.itemsize // max(ends.values(), default=1)
        self._outgoing = {
            to: _buckets(part, capacity) for (by, to), part in links.items() if by == rank
        }
        self._incoming = {
            by: _buckets(part, capacity) for (by, to), part in links.items() if to == rank
        }
        everything = [*self._outgoing.values(), *self._incoming.values()]
        self._rounds = max(map(len, everything), default=0)
        self.peak_bytes = dtype.itemsize * sum(
            max(map(_elements, buckets)) for buckets in everything
        )

    def carry(self, source: Views, target: Views, work: Iterator[None]) -> int:
        """Move what is to be moved; every rank of the group calls it.

        Args:
            source: the slices that this rank sends.
            target: the slices that it receives.
            work: done to its end while the first buckets are under way.

        Returns:
            Bytes received.
        """
        sending, receiving = self._allocate(self._outgoing), self._allocate(self._incoming)
        moved = 0
        for number in range(self._rounds):
            sends, receives = _of_round(self._outgoing, number), _of_round(self._incoming, number)
            for peer, bucket in sends.items():
                for move, flat in _parts(sending[peer], bucket):
                    view = source(move.source, move.start, move.stop)
                    flat.view(view.shape).copy_(view)
            filled = {
                peer: receiving[peer][: _elements(bucket)] for peer, bucket in receives.items()
            }
            leaving = [(peer, sending[peer][: _elements(bucket)]) for peer, bucket in sends.items()]
            works = start_exchange(leaving, list(filled.items()), self._group)
            for _ in work:
                pass
            finish_exchange(works)
            for peer, bucket in receives.items():
                for move, flat in _parts(filled[peer], bucket):
                    view = target(move.target, move.start, move.stop)
                    view.copy_(flat.view(view.shape))
            moved += sum(buffer.nbytes for buffer in filled.values())
        for _ in work:
            pass
        return moved

    def _allocate(self, by_peer: dict[int, list[Bucket]]) -> dict[int, Tensor]:
        return {
            peer: torch.empty(max(map(_elements, buckets)), dtype=self._dtype, device=self._device)
            for peer, buckets in by_peer.items()
        }


def links_of(moves: Sequence[Move]) -> dict[tuple[int, int], list[Move]]:
    """The moves from one rank to another, for each pair that has any."""
    links: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        links.setdefault((move.source_rank, move.target_rank), []).append(move)
    return links


def _buckets(moves: Sequence[Move], capacity: int) -> list[Bucket]:
    """The moves of one link in order, cut and gathered in buckets of at most `capacity` numbers
    where rows allow it.
    """
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
