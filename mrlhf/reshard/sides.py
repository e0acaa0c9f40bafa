"""The two sides of a reshard: the pieces that a rank has in training, and those in the engine.

Ranks with the same pieces have the same shard and differ in the number of their replica. The dense
weights and the experts of a mixture have different replicas in training, so each kind has sides of
its own. A side computes places and ranks from the layout and keeps no list of ranks, so it is as
small for ten thousand ranks as for eight. This file knows layouts; it does not know models or how
moves are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache

from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import EXPERT_REPLICA_AXES, REPLICA_AXES, Axis, ParallelLayout
from mrlhf.weights.shard import Piece

PiecesOfRank = Callable[[int], Sequence[Piece]]
PiecesOfTensors = Callable[[int, Set[str]], Sequence[Piece]]


@dataclass(frozen=True)
class Side:
    """The shards, replicas and pieces of one side."""

    shards: int  # the number of different shards; they are numbered from 0
    replicas: range  # the numbers of the replicas that take part; every shard has each of them
    # (shard, number of the replica) of a global rank; None if the rank has no piece.
    place_of: Callable[[int], tuple[int, int] | None]
    rank_at: Callable[[int, int], int]  # the global rank of (shard, number of the replica)
    pieces: PiecesOfRank  # the pieces of a shard, parameter by parameter
    # The pieces of some named tensors, and maybe more, if that is faster than all.
    list_some: PiecesOfTensors | None = None

    def pieces_of(self, shard: int, tensors: Set[str]) -> list[Piece]:
        """The pieces of a shard that are of these named tensors."""
        if not tensors:
            return []
        listed = self.list_some(shard, tensors) if self.list_some else self.pieces(shard)
        return [piece for piece in listed if piece.name in tensors]

    def shard_of(self, rank: int) -> int | None:
        """The shard of a rank that takes part; None for other ranks."""
        place = self.place_of(rank)
        if place is None or place[1] not in self.replicas:
            return None
        return place[0]

    def part(self, number: int, parts: int) -> Side:
        """The side with part `number` of `parts` of its replicas; a part is a contiguous range."""
        each = len(self.replicas) // parts
        return replace(self, replicas=self.replicas[number * each : (number + 1) * each])


Sides = tuple[Side, Side]
"""Source and target of the weights of one kind."""


def training_side(
    layout: ParallelLayout, pieces_of_rank: PiecesOfRank, replica_axes: tuple[Axis, ...]
) -> Side:
    """The side of a role whose ranks along `replica_axes` have the same pieces."""
    replicas = layout.group_size(*replica_axes)
    return Side(
        shards=layout.world_size // replicas,
        replicas=range(replicas),
        place_of=cache(lambda rank: layout.place(rank, *replica_axes)),
        rank_at=cache(lambda shard, replica: layout.rank_in(shard, replica, *replica_axes)),
        pieces=cache(lambda shard: pieces_of_rank(layout.rank_in(shard, 0, *replica_axes))),
    )


def engine_side(
    engines: EngineLayout,
    pieces_of_rank: PiecesOfRank,
    list_some: PiecesOfTensors | None = None,
) -> Side:
    """The side of the inference replicas, which have the same pieces."""

    def place_of(rank: int) -> tuple[int, int]:
        replica, tp_rank = engines.place(rank)
        return tp_rank, replica

    return Side(
        shards=engines.tp,
        replicas=range(engines.num_replicas),
        place_of=cache(place_of),
        rank_at=cache(lambda tp_rank, replica: engines.rank_at(replica, tp_rank)),
        pieces=cache(lambda tp_rank: pieces_of_rank(engines.rank_at(0, tp_rank))),
        list_some=list_some
        and (lambda tp_rank, tensors: list_some(engines.rank_at(0, tp_rank), tensors)),
    )


def sides_of_all(
    engines: EngineLayout,
    in_training: PiecesOfRank,
    in_engine: PiecesOfRank,
    some_in_engine: PiecesOfTensors | None = None,
) -> list[Sides]:
    """The source and the target of the dense weights, and those of the experts.

    `in_training` and `in_engine` give the pieces of a global rank, `some_in_engine` those that
    belong to some named tensors, and maybe more, if that is faster than to list all.
    """
    # The dense weights and the experts mostly ask for the same ranks.
    in_training = cache(in_training)
    in_engine = cache(in_engine)

    def sides(of_expert: bool, replica_axes: tuple[Axis, ...]) -> Sides:
        return (
            training_side(engines.actor, _of_kind(in_training, of_expert), replica_axes),
            engine_side(engines, _of_kind(in_engine, of_expert), some_in_engine),
        )

    return [sides(False, REPLICA_AXES), sides(True, EXPERT_REPLICA_AXES)]


def sides_around(
    rank: int,
    engines: EngineLayout,
    in_training: PiecesOfRank,
    in_engine: PiecesOfRank,
    some_in_engine: PiecesOfTensors | None = None,
) -> list[Sides]:
    """The sides of `sides_of_all`, with only the replicas that exchange weights with rank `rank`.

    If each replica lies inside one model-parallel group of the actor, weights come from the ranks
    of that group and of the groups that hold all experts together with it.
    """
    kinds = sides_of_all(engines, in_training, in_engine, some_in_engine)
    if not engines.is_inside:
        return kinds

    actor = engines.actor
    together = engines.copies_together
    exchange = actor.coordinates(rank).dp // together
    parts = actor.dp // together
    return [
        (source.part(exchange, parts), target.part(exchange, parts)) for source, target in kinds
    ]


def _of_kind(pieces_of_rank: PiecesOfRank, of_expert: bool) -> PiecesOfRank:
    return lambda rank: [piece for piece in pieces_of_rank(rank) if piece.of_expert == of_expert]
