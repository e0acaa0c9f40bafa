"""What process groups cost ranks 0, 1 and the last of thousands, counted with torch's fake groups.

gloo connects every rank of a group to every other one, through addresses in the job's store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrlhf.parallel import groups
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout

RANKS_OF_A_MACHINE = 8
ACTOR = AxisSizes(tp=8, pp=4)
CRITIC = AxisSizes(tp=4, cp=2)
WORLDS = (256, 1024, 4096)


@dataclass(frozen=True)
class Cost:
    """What one rank does to make all groups.

    Attributes:
        calls: of new_group.
        own: groups that the rank is in, that of all ranks included.
        connections: of gloo, to the other ranks of these groups.
        addresses: that the ranks of all groups leave in the store, for one rank to look up.
    """

    calls: int
    own: int
    connections: int
    addresses: int


@contextmanager
def _faked(rank: int, world_size: int) -> Iterator[list[tuple[int, ...]]]:
    """A job of which only this rank exists; gives the ranks of each group that is made."""
    made: list[tuple[int, ...]] = []
    real = dist.new_group

    def new_group(ranks: list[int], **options: object) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return real(ranks, **options)

    def names(value: str, group: dist.ProcessGroup) -> list[str]:
        return [f"machine {other // RANKS_OF_A_MACHINE}" for other in range(world_size)]

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            mock.patch.object(dist, "new_group", new_group),
            mock.patch.object(groups, "all_gather_objects", names),
        ):
            yield made
    finally:
        dist.destroy_process_group()


def _cost(rank: int, world_size: int) -> Cost:
    with _faked(rank, world_size) as made:
        factory = GroupFactory(timeout_s=60.0)
        for role, sizes in (("actor", ACTOR), ("critic", CRITIC)):
            factory.role_groups(ParallelLayout.for_world(role, world_size, sizes))
    own = [tuple(range(world_size)), *(ranks for ranks in made if rank in ranks)]
    return Cost(
        calls=len(made),
        own=len(own),
        connections=sum(len(ranks) - 1 for ranks in own),
        addresses=sum(len(ranks) for ranks in own),
    )


@pytest.mark.parametrize("place", ["first", "second", "last"])
def test_groups_grow_no_faster_than_ranks(place: str) -> None:
    costs = {}
    for world_size in WORLDS:
        rank = {"first": 0, "second": 1, "last": world_size - 1}[place]
        costs[world_size] = _cost(rank, world_size)

    smallest = costs[WORLDS[0]]
    for world_size, cost in costs.items():
        growth = world_size / WORLDS[0]
        assert cost.own <= smallest.own
        assert cost.calls <= smallest.calls * growth
        assert cost.connections <= smallest.connections * growth * 1.05
        assert cost.addresses <= smallest.addresses * growth * 1.05


def test_a_rank_is_in_few_groups() -> None:
    cost = _cost(0, 1024)
    assert cost.own <= 16
    assert cost.calls <= 4 * 1024
    assert cost.connections <= 4 * 1024
