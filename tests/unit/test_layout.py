"""Ranks, coordinates and groups: what holds for every layout, and literal examples."""

from __future__ import annotations

import itertools
import math

import pytest

from mrlhf.errors import ConfigError
from mrlhf.parallel.layout import AXES, EXPERT_AXES, AxisSizes, Coordinates, ParallelLayout
from mrlhf.parallel.stages import Stages

LAYOUTS = [
    ParallelLayout(tp=tp, cp=cp, pp=pp, dp=dp)
    for tp, cp, pp, dp in itertools.product((1, 2, 4), (1, 2), (1, 2, 3), (1, 3))
]
EXPERT_LAYOUTS = [
    ParallelLayout(tp=4, pp=2, ep=2, etp=2),
    ParallelLayout(tp=2, dp=4, ep=8),
    ParallelLayout(tp=2, cp=2, pp=2, dp=3, ep=3, etp=4),
    ParallelLayout(tp=1, dp=6, ep=2, etp=3),
]
SUBSETS = [
    axes
    for grid in (AXES, EXPERT_AXES)
    for count in range(5)
    for axes in itertools.combinations(grid, count)
]


def test_ranks_run_along_tensor_then_data_then_pipeline() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=3)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 5, 6, 11)] == [
        Coordinates(tp=0, cp=0, dp=0, pp=0, etp=0, ep=0, edp=0),
        Coordinates(tp=1, cp=0, dp=0, pp=0, etp=0, ep=0, edp=1),
        Coordinates(tp=0, cp=0, dp=1, pp=0, etp=0, ep=0, edp=2),
        Coordinates(tp=1, cp=0, dp=2, pp=0, etp=0, ep=0, edp=5),
        Coordinates(tp=0, cp=0, dp=0, pp=1, etp=0, ep=0, edp=0),
        Coordinates(tp=1, cp=0, dp=2, pp=1, etp=0, ep=0, edp=5),
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rank_at_inverts_coordinates(layout: ParallelLayout) -> None:
    seen = set()
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert layout.rank_at(tp=place.tp, cp=place.cp, dp=place.dp, pp=place.pp) == rank
        for axis in {*AXES, *EXPERT_AXES}:
            assert 0 <= getattr(place, axis) < layout.size(axis)
        seen.add(place)
    assert len(seen) == layout.world_size


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERT_LAYOUTS], ids=str)
def test_groups_cover_the_world_once_and_differ_along_their_axes_only(
    layout: ParallelLayout,
) -> None:
    for axes in SUBSETS:
        groups = layout.groups(*axes)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        size = math.prod(getattr(layout, axis) for axis in axes)
        for group in groups:
            assert len(group) == size and group == sorted(group)
            grid = AXES if set(axes) <= set(AXES) else EXPERT_AXES
            for fixed in set(grid) - set(axes):
                assert len({getattr(layout.coordinates(rank), fixed) for rank in group}) == 1


def test_groups_of_a_small_layout() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("tp", "pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2)
    assert layout.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("cp", "dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_experts_are_shared_out_within_each_stage() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2, ep=2)
    assert layout.groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("edp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    split = ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=2)
    assert split.groups("etp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert split.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert split.groups("etp", "ep", "pp") == [list(range(8))]


def test_axes_of_two_grids_make_no_group() -> None:
    with pytest.raises(AssertionError, match="two grids"):
        ParallelLayout(dp=2).groups("tp", "ep")


def test_data_parallelism_takes_what_is_left() -> None:
    layout = ParallelLayout.for_world("actor", 24, AxisSizes(tp=2, pp=3))
    assert layout == ParallelLayout(tp=2, pp=3, dp=4, etp=2)
    assert AxisSizes(tp=2, cp=2, pp=3).dp(24) == 2


def test_a_world_that_does_not_divide() -> None:
    with pytest.raises(ConfigError) as error:
        ParallelLayout.for_world("critic", 6, AxisSizes(tp=2, pp=2))
    assert str(error.value) == (
        "critic: world size 6 is not divisible by tp 2 x pp 2 = 4; start a multiple of 4 processes "
        "or change critic.tp or critic.pp"
    )


def test_a_world_that_does_not_divide_names_every_axis_that_is_used() -> None:
    assert AxisSizes(tp=2, cp=2).problem("actor", 6) == (
        "actor: world size 6 is not divisible by tp 2 x cp 2 x pp 1 = 4; start a multiple of 4 "
        "processes or change actor.tp, actor.cp or actor.pp"
    )


@pytest.mark.parametrize(
    ("sizes", "etp"),
    [
        (AxisSizes(tp=4), 4),
        (AxisSizes(tp=4, etp=2), 2),
        (AxisSizes(tp=4, ep=2), 1),
        (AxisSizes(tp=4, ep=2, etp=4), 4),
    ],
)
def test_an_expert_is_split_as_dense_layers_are_unless_experts_are_shared_out(
    sizes: AxisSizes, etp: int
) -> None:
    assert ParallelLayout.for_world("actor", 8, sizes).etp == etp


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (AxisSizes(tp=4, etp=3), "actor.etp 3 does not divide actor.tp 4; use 1, 2 or 4"),
        (AxisSizes(tp=1, etp=2), "actor.etp 2 does not divide actor.tp 1; use 1"),
        (
            AxisSizes(pp=2, ep=3),
            "actor.ep 3 x actor.etp 1 = 3 does not divide the 4 ranks of a pipeline stage; set "
            "actor.ep to 1, 2 or 4",
        ),
        (
            AxisSizes(tp=2, ep=8, etp=2),
            "actor.ep 8 x actor.etp 2 = 16 does not divide the 8 ranks of a pipeline stage; set "
            "actor.ep to 1, 2 or 4",
        ),
    ],
)
def test_experts_that_do_not_fit_the_ranks(sizes: AxisSizes, message: str) -> None:
    assert sizes.problem("actor", 8) == message


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        (AxisSizes(tp=2, pp=3), 6),
        (AxisSizes(ep=4), 4),
        (AxisSizes(tp=2, pp=2, ep=3), 12),
        (AxisSizes(tp=2, ep=4, etp=2), 8),
    ],
)
def test_the_smallest_world(sizes: AxisSizes, world: int) -> None:
    assert sizes.smallest_world == world
    fits = [size for size in range(1, world + 1) if sizes.problem("actor", size) is None]
    assert fits == [world]


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERT_LAYOUTS], ids=str)
def test_the_first_copy_holds_everything(layout: ParallelLayout) -> None:
    def held(ranks: list[int]) -> set[tuple[int, ...]]:
        places = [layout.coordinates(rank) for rank in ranks]
        dense = {(place.pp, place.tp) for place in places}
        return dense | {(place.pp, place.etp, place.ep) for place in places}

    assert held(layout.first_copy) == held(list(range(layout.world_size)))
    if layout.etp == layout.ep == 1:
        assert len(layout.first_copy) == layout.tp * layout.pp


def test_virtual_stages_take_no_ranks() -> None:
    sizes = AxisSizes(tp=2, pp=2, vpp=3, pp_layers=(1, 2, 2, 2, 2, 0))
    layout = ParallelLayout.for_world("actor", 8, sizes)
    assert layout.world_size == 8 and layout.dp == 2
    assert layout.stages == sizes.stages == Stages(2, 3, (1, 2, 2, 2, 2, 0))
    assert str(sizes) == "tp 2 x pp 2"
    assert sizes.has_ranks_of(AxisSizes(tp=2, pp=2)) and sizes != AxisSizes(tp=2, pp=2)
    assert not sizes.has_ranks_of(AxisSizes(tp=2, pp=4))


def test_a_checkpoint_states_the_sizes_that_matter() -> None:
    assert ParallelLayout(tp=2).stated == {"tp": 2, "pp": 1, "dp": 1}
    assert ParallelLayout(pp=2, vpp=2, dp=4, ep=2).stated == {
        "tp": 1,
        "pp": 2,
        "vpp": 2,
        "dp": 4,
        "ep": 2,
    }
