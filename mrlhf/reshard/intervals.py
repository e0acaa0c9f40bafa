"""The shards that hold each interval of each named tensor.

Pure arithmetic on the pieces of one side. This file does not know ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Set
from itertools import pairwise
from typing import NamedTuple

from mrlhf.errors import WeightError
from mrlhf.reshard.moves import Move, numbers_in_row, viewable_parts
from mrlhf.reshard.sides import Side
from mrlhf.weights.shard import Key, Piece


class Interval(NamedTuple):
    """Rows `start` to `stop` (exclusive) of a tensor, all of which the same shards hold."""

    start: int
    stop: int
    # Decides which of several holders sends it: the share of the numbers held by exactly these
    # shards that lie before it, from 0 to below 1; 0 if one rank alone holds it.
    turn: float
    held: dict[int, Piece]  # the piece of each shard that holds it, by shard, ascending

    @property
    def elements(self) -> int:
        """The count of numbers in the interval; 0 if nobody holds it."""
        piece = next(iter(self.held.values()), None)
        return 0 if piece is None else (self.stop - self.start) * numbers_in_row(piece)

    def moves(self, rank: int, shard: int, receiver: int, needed: Piece) -> Iterator[Move]:
        """The moves of the interval from `rank`, which has `shard`, to a piece of `receiver`."""
        held = self.held[shard]
        return viewable_parts(Move(rank, receiver, held, needed, self.start, self.stop))


class _Tensor(NamedTuple):
    """The intervals of one tensor, cut at the edges of its slices; there may be gaps."""

    edges: list[int]
    intervals: list[Interval]


_HELD_NOWHERE = _Tensor([], [])


class HeldIntervals:
    """The intervals of all tensors of one side."""

    def __init__(self, side: Side) -> None:
        slices: dict[tuple[str, int], list[tuple[int, Piece]]] = {}
        for shard in range(side.shards):
            for piece in side.pieces(shard):
                slices.setdefault((piece.name, piece.dim), []).append((shard, piece))
        self._tensors = {tensor: _cut(held) for tensor, held in slices.items()}
        self.shared: set[str] = set()  # tensors with an interval that several ranks hold
        self._take_turns(len(side.replicas))

    def within(self, piece: Piece) -> Iterator[Interval]:
        """The intervals of `piece`, cut at its ends; WeightError if no shard holds a part of it."""
        tensor = self._tensors.get((piece.name, piece.dim), _HELD_NOWHERE)
        first = bisect_left(tensor.edges, piece.start + 1) - 1
        last = bisect_left(tensor.edges, piece.stop)

        covered = piece.start
        for interval in tensor.intervals[max(0, first) : last]:
            start = max(piece.start, interval.start)
            stop = min(piece.stop, interval.stop)
            if not interval.held or start > covered:
                break
            yield Interval(start, stop, interval.turn, interval.held)
            covered = stop

        if covered < piece.stop:
            raise WeightError(
                f"no rank holds {piece.name}[{covered}:{piece.stop}]; source and target are of "
                "different models"
            )

    def _take_turns(self, replicas: int) -> None:
        """Set the `turn` of each interval: count the numbers of the same shards before it."""
        before: Counter[tuple[int, ...]] = Counter()
        shared: list[tuple[list[Interval], int]] = []
        for (name, _), tensor in reversed(self._tensors.items()):
            for place, interval in enumerate(tensor.intervals):
                if len(interval.held) * replicas > 1:
                    before[tuple(interval.held)] += interval.elements
                    shared.append((tensor.intervals, place))
                    self.shared.add(name)
        total = before.copy()

        for intervals, place in shared:
            interval = intervals[place]
            holders = tuple(interval.held)
            before[holders] -= interval.elements
            turn = before[holders] / max(1, total[holders])
            intervals[place] = interval._replace(turn=turn)


def _cut(slices: list[tuple[int, Piece]]) -> _Tensor:
    if len(slices) == 1:  # as of most experts
        ((shard, piece),) = slices
        whole = Interval(piece.start, piece.stop, 0.0, {shard: piece})
        return _Tensor([piece.start, piece.stop], [whole])

    edges = sorted({edge for _, piece in slices for edge in (piece.start, piece.stop)})
    intervals = [Interval(start, stop, 0.0, {}) for start, stop in pairwise(edges)]
    for shard, piece in slices:
        first = bisect_left(edges, piece.start)
        last = bisect_left(edges, piece.stop)
        for interval in intervals[first:last]:
            interval.held.setdefault(shard, piece)
    return _Tensor(edges, intervals)


def shards_by_slice(side: Side, tensors: Set[str]) -> dict[Key, tuple[int, ...]]:
    """The shards that hold each slice of some tensors, ascending."""
    shards: dict[Key, list[int]] = {}
    for shard in range(side.shards):
        for piece in side.pieces_of(shard, tensors):
            shards.setdefault(piece.key, []).append(shard)
    return {key: tuple(numbers) for key, numbers in shards.items()}
