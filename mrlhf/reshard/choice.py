"""Chooses which of several holders of a slice sends it, by a rule that each rank evaluates alone.

A rank takes a slice from a rank near it, such as one of the same machine, if one holds it;
otherwise from any. Among the ranks that may send a slice, those that lack it are dealt out by their
position. For each slice the deal starts at another sender: at the first one for the first of the
bytes that they hold, at the last one for the last.

The deal is even where all machines have equally many ranks. It counts takers that a rank of their
own machine serves, so with uneven machines some ranks send a few times as much as others.

A sender finds those that chose it by inverting the rule. It looks at the ranks near it and at the
few positions that are dealt to it, not at all ranks. This file knows shards and ranks; it does not
know tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mrlhf.reshard.sides import Side

Near = Callable[[int], Sequence[int]]
_Shards = tuple[int, ...]


class Demand(NamedTuple):
    """A slice that is needed.

    Attributes:
        holders: the source shards that have the slice, ascending.
        takers: the target shards that need it, ascending; a rank of theirs may also be a holder.
        turn: at which of the senders the deal starts, as a part of their number.
    """

    holders: _Shards
    takers: _Shards
    turn: float


@dataclass(frozen=True)
class _Vicinity:
    """The ranks near each other that hold a slice, and those that lack it, both ascending."""

    senders: Sequence[int]
    lacking: Sequence[int]

    def sender_to(self, rank: int, turn: float) -> int:
        """Who of them sends the slice to `rank`."""
        count = len(self.senders)
        dealt = self.lacking.index(rank) * count // len(self.lacking)
        return self.senders[(dealt + int(turn * count)) % count]


class Choice:
    """The rule, for two sides and one idea of which ranks are near each other."""

    def __init__(self, source: Side, target: Side, near: Near) -> None:
        """Keep the sides.

        Args:
            source: who holds what.
            target: who needs what.
            near: the ranks near a rank, ascending, itself among them; the same list for each of
                them. Ranks that have no others near them may have an empty list.
        """
        self._source = source
        self._target = target
        self._near = near
        self._vicinities: dict[tuple[_Shards, _Shards, int], _Vicinity] = {}

    def sender_to(self, rank: int, demand: Demand) -> int:
        """The rank that sends a slice to `rank`, which needs it and does not hold it."""
        senders = self._count(self._source, demand.holders)
        if senders == 1:
            return _rank_number(self._source, demand.holders, 0)
        vicinity = self._vicinity(rank, demand)
        if vicinity.senders:
            return vicinity.sender_to(rank, demand.turn)

        place = self._target.place_of(rank)
        assert place is not None, f"rank {rank} is not on the target's side"
        shard, replica = place
        position = demand.takers.index(shard) * len(self._target.replicas)
        position += replica - self._target.replicas.start
        takers = self._count(self._target, demand.takers)

        number = (position * senders // takers + int(demand.turn * senders)) % senders
        return _rank_number(self._source, demand.holders, number)

    def receivers_from(self, rank: int, shard: int, demand: Demand) -> list[int]:
        """The ranks of target shard `shard` that get a slice from `rank`, which holds it."""
        vicinity = self._vicinity(rank, demand)
        receivers = [
            near
            for near in vicinity.lacking
            if self._target.shard_of(near) == shard
            and vicinity.sender_to(near, demand.turn) == rank
        ]

        for far in self._dealt_to(rank, shard, demand):
            is_holder = self._source.shard_of(far) in demand.holders
            if not is_holder and not self._vicinity(far, demand).senders:
                receivers.append(far)
        return sorted(receivers)

    def _dealt_to(self, rank: int, shard: int, demand: Demand) -> Iterator[int]:
        """The ranks of target shard `shard` whose position is dealt to `rank` among all senders."""
        place = self._source.place_of(rank)
        assert place is not None, f"rank {rank} is not on the source's side"
        number = demand.holders.index(place[0]) * len(self._source.replicas)
        number += place[1] - self._source.replicas.start
        senders = self._count(self._source, demand.holders)
        takers = self._count(self._target, demand.takers)

        # Those positions p of takers with p * senders // takers equal to the share.
        share = (number - int(demand.turn * senders)) % senders
        first = -(-share * takers // senders)
        stop = -(-(share + 1) * takers // senders)

        replicas = len(self._target.replicas)
        shard_first = demand.takers.index(shard) * replicas
        for position in range(max(first, shard_first), min(stop, shard_first + replicas)):
            yield _rank_number(self._target, demand.takers, position)

    def _vicinity(self, rank: int, demand: Demand) -> _Vicinity:
        near = self._near(rank)
        where = near[0] if near else -1
        key = (demand.holders, demand.takers, where)
        if key not in self._vicinities:
            senders: list[int] = []
            lacking: list[int] = []
            for other in near:
                if self._source.shard_of(other) in demand.holders:
                    senders.append(other)
                elif self._target.shard_of(other) in demand.takers:
                    lacking.append(other)
            self._vicinities[key] = _Vicinity(senders, lacking)
        return self._vicinities[key]

    @staticmethod
    def _count(side: Side, shards: _Shards) -> int:
        return len(shards) * len(side.replicas)


def _rank_number(side: Side, shards: _Shards, number: int) -> int:
    """The rank with this number among the ranks of some shards, shard by shard."""
    place, replica = divmod(number, len(side.replicas))
    return side.rank_at(shards[place], side.replicas[replica])
