"""The plans of all ranks of a reshard, put together and checked against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mrlhf.reshard.moves import Move
from mrlhf.reshard.plan import Alias, Planner, ReshardPlan
from mrlhf.reshard.sides import Side
from mrlhf.weights.shard import Piece


@dataclass(frozen=True)
class WholePlan:
    """What all ranks do."""

    plans: dict[int, ReshardPlan]

    @property
    def moves(self) -> list[Move]:
        return [move for plan in self.plans.values() for move in plan.receives]

    @property
    def copies(self) -> list[Move]:
        return [copy for plan in self.plans.values() for copy in plan.copies]

    @property
    def aliases(self) -> list[tuple[int, Alias]]:
        return [(rank, alias) for rank, plan in self.plans.items() for alias in plan.aliases]

    @property
    def minimum(self) -> dict[int, int]:
        return {rank: plan.bytes_minimum for rank, plan in self.plans.items()}

    @property
    def bytes_moved(self) -> int:
        return sum(plan.bytes_received for plan in self.plans.values())

    @property
    def bytes_minimum(self) -> int:
        return sum(self.minimum.values())

    @property
    def bytes_local(self) -> int:
        return sum(plan.bytes_copied for plan in self.plans.values())


def plan_all(planner: Planner, ranks: Iterable[int]) -> WholePlan:
    """Plan for each rank alone, and check that the plans agree."""
    plans = {rank: planner.plan(rank) for rank in ranks}
    check_agreement(plans)
    return WholePlan(plans)


def check_agreement(plans: Mapping[int, ReshardPlan]) -> None:
    """What each rank sends to another is what the other receives from it, in the same order."""
    sent: dict[tuple[int, int], list[Move]] = {}
    received: dict[tuple[int, int], list[Move]] = {}
    for rank, plan in plans.items():
        assert plan.rank == rank
        assert all(copy.source_rank == copy.target_rank == rank for copy in plan.copies)
        for move in plan.sends:
            assert move.source_rank == rank != move.target_rank
            sent.setdefault((rank, move.target_rank), []).append(move)
        for move in plan.receives:
            assert move.source_rank != rank == move.target_rank
            received.setdefault((move.source_rank, rank), []).append(move)
    assert sent == received


def side_of_ranks(pieces: Mapping[int, Sequence[Piece]]) -> Side:
    """A side of ranks that each have other pieces."""
    ranks = sorted(pieces)
    shards = {rank: shard for shard, rank in enumerate(ranks)}
    return Side(
        shards=len(ranks),
        replicas=range(1),
        place_of=lambda rank: (shards[rank], 0) if rank in shards else None,
        rank_at=lambda shard, replica: ranks[shard],
        pieces=lambda shard: pieces[ranks[shard]],
    )
