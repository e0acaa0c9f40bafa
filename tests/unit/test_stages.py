"""Which layers each virtual stage of a pipeline has, with literal numbers."""

from __future__ import annotations

import itertools

import pytest

from mrlhf.parallel.stages import Stages


@pytest.mark.parametrize(
    ("pp", "vpp", "layers", "split"),
    [
        (1, 1, 5, (5,)),
        (2, 1, 6, (3, 3)),
        (2, 2, 8, (2, 2, 2, 2)),
        (4, 1, 6, (1, 2, 2, 1)),
        (2, 2, 6, (1, 2, 2, 1)),
        (4, 4, 62, (3, *[4] * 14, 3)),
        (4, 1, 8, (2, 2, 2, 2)),  # the layers alone divide
        (2, 1, 5, None),
        (4, 1, 7, None),
        (4, 1, 2, None),  # the ends would have no layer
        (8, 1, 4, None),
    ],
)
def test_layers_of_equal_stages(
    pp: int, vpp: int, layers: int, split: tuple[int, ...] | None
) -> None:
    assert Stages(pp, vpp).split(layers) == split


def test_layers_that_are_named() -> None:
    stages = Stages(2, 2, (0, 3, 1, 2))
    assert stages.split(6) == (0, 3, 1, 2)
    assert stages.split(7) is None
    assert Stages(2, 1, (0, 3, 1, 2)).split(6) is None
    assert [list(stages.layers(number, 6)) for number in range(4)] == [[], [0, 1, 2], [3], [4, 5]]


def test_virtual_stages_go_round_the_ranks() -> None:
    stages = Stages(pp=3, vpp=2)
    assert [list(stages.numbers_on(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert stages.count == 6


@pytest.mark.parametrize(("pp", "vpp"), itertools.product((1, 2, 3, 4, 6), (1, 2, 3)))
def test_every_layer_is_on_one_stage(pp: int, vpp: int) -> None:
    stages = Stages(pp, vpp)
    for layers in range(1, 40):
        if stages.split(layers) is None:
            continue
        held = [stages.layers(number, layers) for number in range(stages.count)]
        assert list(itertools.chain(*held)) == list(range(layers))
        assert all(len(each) > 0 for each in held)
