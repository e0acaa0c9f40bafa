"""Activations are those that plans count: of a layer, and of a whole update at its peak."""

from __future__ import annotations

from pathlib import Path

from tests.device.peaks_table import PAGE as COUNTED
from tests.device.peaks_table import lines, peaks
from tests.simulated_device.client import Devices

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")


def test_a_layer_keeps_what_the_rule_says(device: Devices) -> None:
    (found,) = device.run("tests.device.activations_here:compare")
    assert len(found) == 32
    for name, (counted, rule) in found.items():
        # The rule leaves out a few numbers a token and head.
        assert abs(counted - rule) <= 0.04 * rule, (name, counted, rule)
    assert "8 h + 6 q + 6 k + 6 f bytes" in PAGE
    assert "2 q + 2 k more" in PAGE and "2 h + 5 e +\n26 n" in PAGE
    assert "it keeps 2 h." in PAGE


def test_an_update_takes_what_a_plan_says_at_its_peak(device: Devices) -> None:
    """On every rank, and so in each stage."""
    found = peaks(device)
    assert len(found) == 4 + 2 * 8 + 4 * 2
    for peak in found:
        assert abs(peak.predicted - peak.counted) <= 0.05 * peak.counted, peak
    page = COUNTED.read_text(encoding="utf-8")
    for predicted in lines(found):
        assert predicted in page
