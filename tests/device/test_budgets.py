"""Kernels, waits and copies stay within the bounds of `tests/counted.md`."""

from __future__ import annotations

import pytest

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


def test_no_form_of_a_kernel_is_new_after_the_first_step(device: Devices) -> None:
    """Triton compiles a form when it first occurs: in the engine's warm-up, or in update 1."""
    pytest.importorskip("triton")
    for body, kernels, count in (
        *(("rollout", 7, 9), ("updates", 7, 9), ("delta_nets", 8, 11), ("latents", 6, 10)),
    ):
        (found,) = device.run(f"tests.device.forms_here:{body}")
        for name, forms in found.items():
            assert len({form.split()[0] for form in forms["first"]}) == kernels, (name, forms)
            assert len(forms["first"]) == count, (name, forms)
            assert not forms["added"], (name, forms)
