"""Kernels, waits and copies stay within the bounds of `tests/counted.md`."""

from __future__ import annotations

from tests.device import speed_table
from tests.simulated_device.client import Devices


def test_no_count_is_above_its_bound(device: Devices) -> None:
    bounds = speed_table.bounds()
    figures = speed_table.figures(device)
    assert figures.keys() == bounds.keys(), "run: python -m tests.device.speed_table"
    above = {
        name: f"{number:g} > {bounds[name]:g}"
        for name, number in figures.items()
        if number > bounds[name]
    }
    assert not above, f"{above}; if that is meant, run: python -m tests.device.speed_table"


def test_the_page_bounds_something() -> None:
    assert len(speed_table.bounds()) > 10
    assert all(number >= 0 for number in speed_table.bounds().values())
