"""The two sides of a reshard: which pieces a rank has in training, and which in the engine.

Ranks with the same pieces have the same shard and differ in the number of their replica. A side
computes places and ranks from the layout and keeps no list of ranks, so it is as small for ten
thousand ranks as for eight. This file knows layouts; it does not know models or how moves are
planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mrlhf.parallel.layout import REPLICA_AXES, EngineLayout, ParallelLayout
from mrlhf.weights.shard import Piece


@dataclass(frozen=True)
class Side:
    """Who has what on one side.

    Attributes:
        shards: how many different shards there are; they are numbered from 0.
        replicas: the numbers of the replicas that take part; every shard has each of them.
        place_of: (shard, number of the replica) of a global rank; None if the rank has no piece.
        rank_at: the global rank with this shard and this number of the replica.
        pieces: the pieces of a shard, parameter by parameter.
    """

    shards: int
    replicas: range
    place_of: Callable[[int], tuple[int, int] | None]
    rank_at: Callable[[int, int], int]
    pieces: Callable[[int], Sequence[Piece]]

    def shard_of(self, rank: int) -> int | None:
        """The shard of a rank that takes part; None for other ranks."""
        place = self.place_of(rank)
        if place is None or place[1] not in self.replicas:
            return None
        return place[0]


def training_side(layout: ParallelLayout, pieces_of_rank: Callable[[int], Sequence[Piece]]) -> Side:
    """The side of a role, whose data- and context-parallel ranks have the same pieces."""
    replicas = layout.group_size(*REPLICA_AXES)
    return Side(
        shards=layout.world_size // replicas,
        replicas=range(replicas),
        place_of=lambda rank: layout.place(rank, *REPLICA_AXES),
        rank_at=lambda shard, replica: layout.rank_in(shard, replica, *REPLICA_AXES),
        pieces=cache(lambda shard: pieces_of_rank(layout.rank_in(shard, 0, *REPLICA_AXES))),
    )


def engine_side(engines: EngineLayout, pieces_of_rank: Callable[[int], Sequence[Piece]]) -> Side:
    """The side of the inference replicas, which have the same pieces."""

    def place_of(rank: int) -> tuple[int, int]:
        replica, tp_rank = engines.place(rank)
        return tp_rank, replica

    return Side(
        shards=engines.tp,
        replicas=range(engines.num_replicas),
        place_of=place_of,
        rank_at=lambda tp_rank, replica: engines.rank_at(replica, tp_rank),
        pieces=cache(lambda tp_rank: pieces_of_rank(engines.rank_at(0, tp_rank))),
    )


def sides_around(
    rank: int,
    engines: EngineLayout,
    pieces_in_training: Callable[[int], Sequence[Piece]],
    pieces_in_engine: Callable[[int], Sequence[Piece]],
) -> tuple[Side, Side]:
    """The source and the target, as far as weights can come to or from global rank `rank`.

    If each replica lies inside one model-parallel group of the actor, only the ranks of this rank's
    group take part.
    """
    source = training_side(engines.actor, pieces_in_training)
    target = engine_side(engines, pieces_in_engine)
    if not engines.is_inside:
        return source, target

    actor = engines.actor
    group = actor.coordinates(rank).dp

    def of_group(replicas: int) -> range:
        """The numbers of those replicas that lie in this rank's group; they follow each other."""
        per_group = replicas // actor.dp
        return range(group * per_group, (group + 1) * per_group)

    return (
        replace(source, replicas=of_group(actor.group_size(*REPLICA_AXES))),
        replace(target, replicas=of_group(engines.num_replicas)),
    )


def side_of_ranks(pieces: Mapping[int, Sequence[Piece]]) -> Side:
    """The side of any ranks, each with pieces of its own."""
    ranks = sorted(pieces)
    shards = {rank: shard for shard, rank in enumerate(ranks)}
    return Side(
        shards=len(ranks),
        replicas=range(1),
        place_of=lambda rank: (shards[rank], 0) if rank in shards else None,
        rank_at=lambda shard, replica: ranks[shard],
        pieces=lambda shard: pieces[ranks[shard]],
    )
