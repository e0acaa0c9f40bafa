"""Ranks, coordinates and groups: what holds for every layout, and literal examples."""

from __future__ import annotations

import itertools
import math

import pytest

from mrlhf.errors import ConfigError
from mrlhf.parallel.layout import AXES, Coordinates, EngineLayout, ParallelLayout

LAYOUTS = [
    ParallelLayout(tp, pp, dp) for tp, pp, dp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3))
]
SUBSETS = [axes for count in range(4) for axes in itertools.combinations(AXES, count)]


def test_ranks_run_along_tensor_then_data_then_pipeline() -> None:
    assert AXES == ("tp", "dp", "pp")
    layout = ParallelLayout(tp=2, pp=2, dp=3)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 5, 6, 11)] == [
        Coordinates(tp=0, dp=0, pp=0),
        Coordinates(tp=1, dp=0, pp=0),
        Coordinates(tp=0, dp=1, pp=0),
        Coordinates(tp=1, dp=2, pp=0),
        Coordinates(tp=0, dp=0, pp=1),
        Coordinates(tp=1, dp=2, pp=1),
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rank_at_inverts_coordinates(layout: ParallelLayout) -> None:
    seen = set()
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert layout.rank_at(place.tp, place.dp, place.pp) == rank
        assert place.tp < layout.tp and place.dp < layout.dp and place.pp < layout.pp
        seen.add(place)
    assert len(seen) == layout.tp * layout.pp * layout.dp


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_cover_the_world_once_and_differ_along_their_axes_only(
    layout: ParallelLayout,
) -> None:
    for axes in SUBSETS:
        groups = layout.groups(*axes)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        size = math.prod(getattr(layout, axis) for axis in axes)
        for group in groups:
            assert len(group) == size and group == sorted(group)
            for fixed in set(AXES) - set(axes):
                assert len({getattr(layout.coordinates(rank), fixed) for rank in group}) == 1


def test_groups_of_a_small_layout() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("tp", "pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_data_parallelism_takes_what_is_left() -> None:
    assert ParallelLayout.for_world("actor", 24, tp=2, pp=3) == ParallelLayout(tp=2, pp=3, dp=4)


def test_a_world_that_does_not_divide() -> None:
    with pytest.raises(ConfigError) as error:
        ParallelLayout.for_world("critic", 6, tp=2, pp=2)
    assert str(error.value) == (
        "critic: tp 2 x pp 2 = 4 does not divide the world size 6; "
        "start a multiple of 4 processes or lower critic.tp or critic.pp"
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stages_hold_all_layers_in_order(layout: ParallelLayout) -> None:
    layers = [list(layout.stage_layers(stage, 6)) for stage in range(layout.pp)]
    assert list(itertools.chain(*layers)) == list(range(6))
    assert {len(stage) for stage in layers} == {6 // layout.pp}


def test_replicas_of_a_small_layout() -> None:
    actor = ParallelLayout(tp=2, pp=2, dp=2)
    assert EngineLayout.inside(actor, 2).replicas == ((0, 1), (4, 5), (2, 3), (6, 7))
    assert EngineLayout.inside(actor, 4).replicas == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert EngineLayout.inside(actor, 4).place(6) == (1, 2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replicas_lie_inside_model_parallel_groups_and_cover_the_world(
    layout: ParallelLayout,
) -> None:
    size = layout.tp * layout.pp
    divisors = [tp for tp in range(1, size + 1) if size % tp == 0]
    for tp in divisors:
        engines = EngineLayout.inside(layout, tp)
        assert sorted(itertools.chain(*engines.replicas)) == list(range(layout.world_size))
        for number, replica in enumerate(engines.replicas):
            assert len(replica) == engines.tp == tp
            assert len({layout.coordinates(rank).dp for rank in replica}) == 1
            assert [engines.place(rank) for rank in replica] == [
                (number, place) for place in range(tp)
            ]


def test_an_engine_that_does_not_divide_the_actor() -> None:
    with pytest.raises(ConfigError) as error:
        EngineLayout.inside(ParallelLayout(tp=2, pp=2, dp=2), 3)
    assert (
        str(error.value)
        == "rollout.tp 3 does not divide actor.tp 2 x actor.pp 2 = 4; choose a divisor of it"
    )
