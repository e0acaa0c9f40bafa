"""Chooses which of several holders of a slice sends it, by a rule that each rank evaluates alone.

A rank takes a slice from a rank near it, for example on the same machine, if one holds it;
otherwise from any. The ranks that lack a slice are dealt out, by their position, to the ranks that
may send it. For each slice the deal starts at another sender: at the first one for the first of the
bytes that they hold, at the last one for the last.

The deal is even where all machines have equally many ranks. It also counts ranks that a rank of
their own machine serves, so with uneven machines some ranks send a few times as much as others.

A sender finds the ranks that chose it by inverting the rule. It looks at the ranks near it and at
the few positions that are dealt to it, not at all ranks. This file knows shards and ranks; it does
not know tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mrlhf.reshard.sides import Side

NearRanks = Callable[[int], Sequence[int]]
_Shards = tuple[int, ...]


class Demand(NamedTuple):
    """A slice that is needed."""

    holders: _Shards  # the source shards that have the slice, ascending
    receivers: _Shards  # the target shards that need it, ascending; their ranks may also be holders
    turn: float  # the sender at which the deal starts, as a fraction of the number of senders


@dataclass(frozen=True)
class _Vicinity:
    """Ranks near each other: those that hold a slice and those that lack it, both ascending."""

    senders: Sequence[int]
    lacking: Sequence[int]

    def sender_to(self, rank: int, turn: float) -> int:
        """The rank of the vicinity that sends the slice to `rank`."""
        count = len(self.senders)
        dealt = self.lacking.index(rank) * count // len(self.lacking)
        return self.senders[(dealt + int(turn * count)) % count]


class SenderChoice:
    """The rule for a source and a target side, and for one definition of near ranks."""

    def __init__(self, source: Side, target: Side, near: NearRanks) -> None:
        """Keep the sides; `near` gives the ranks near a rank, the same for each of them.

        They are ascending, the rank itself among them; or none for a rank that is near no other.
        """
        self._source = source
        self._target = target
        self._near = near
        self._vicinities: dict[tuple[_Shards, _Shards, int], _Vicinity] = {}

    def sender_to(self, rank: int, demand: Demand) -> int:
        """The rank that sends a slice to `rank`, which needs it and does not hold it."""
        senders = self._count(self._source, demand.holders)
        if senders == 1:
            return _rank_with_number(self._source, demand.holders, 0)
        vicinity = self._vicinity(rank, demand)
        if vicinity.senders:
            return vicinity.sender_to(rank, demand.turn)

        position = _number_of_rank(self._target, demand.receivers, rank)
        receivers = self._count(self._target, demand.receivers)
        number = (position * senders // receivers + int(demand.turn * senders)) % senders
        return _rank_with_number(self._source, demand.holders, number)

    def receivers_from(self, rank: int, shard: int, demand: Demand) -> list[int]:
        """The ranks of target shard `shard` that get a slice from `rank`, which holds it."""
        vicinity = self._vicinity(rank, demand)
        ranks = [
            near
            for near in vicinity.lacking
            if self._target.shard_of(near) == shard
            and vicinity.sender_to(near, demand.turn) == rank
        ]

        for far in self._dealt_to(rank, shard, demand):
            is_holder = self._source.shard_of(far) in demand.holders
            if not is_holder and not self._vicinity(far, demand).senders:
                ranks.append(far)
        return sorted(ranks)

    def _dealt_to(self, rank: int, shard: int, demand: Demand) -> Iterator[int]:
        """The ranks of target shard `shard` whose position is dealt to `rank` among all senders."""
        number = _number_of_rank(self._source, demand.holders, rank)
        senders = self._count(self._source, demand.holders)
        receivers = self._count(self._target, demand.receivers)

        # The positions p of receivers for which p * senders // receivers is the share.
        share = (number - int(demand.turn * senders)) % senders
        first = -(-share * receivers // senders)
        stop = -(-(share + 1) * receivers // senders)

        replicas = len(self._target.replicas)
        shard_first = demand.receivers.index(shard) * replicas
        for position in range(max(first, shard_first), min(stop, shard_first + replicas)):
            yield _rank_with_number(self._target, demand.receivers, position)

    def _vicinity(self, rank: int, demand: Demand) -> _Vicinity:
        near = self._near(rank)
        where = near[0] if near else -1
        key = (demand.holders, demand.receivers, where)
        if key not in self._vicinities:
            senders: list[int] = []
            lacking: list[int] = []
            for other in near:
                if self._source.shard_of(other) in demand.holders:
                    senders.append(other)
                elif self._target.shard_of(other) in demand.receivers:
                    lacking.append(other)
            self._vicinities[key] = _Vicinity(senders, lacking)
        return self._vicinities[key]

    @staticmethod
    def _count(side: Side, shards: _Shards) -> int:
        return len(shards) * len(side.replicas)


def _number_of_rank(side: Side, shards: _Shards, rank: int) -> int:
    """The number of the rank among the ranks of some shards, shard by shard."""
    place = side.place_of(rank)
    assert place is not None, f"rank {rank} is not on this side"
    shard, replica = place
    return shards.index(shard) * len(side.replicas) + replica - side.replicas.start


def _rank_with_number(side: Side, shards: _Shards, number: int) -> int:
    """The inverse of `_number_of_rank`."""
    place, replica = divmod(number, len(side.replicas))
    return side.rank_at(shards[place], side.replicas[replica])
