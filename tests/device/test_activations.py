"""A layer keeps the bytes of activations that docs/parallelism.md computes with."""

from __future__ import annotations

from pathlib import Path

from tests.simulated_device.client import Devices

PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")


def test_a_layer_keeps_what_the_rule_says(device: Devices) -> None:
    (found,) = device.run("tests.device.activations_here:compare")
    assert len(found) == 22
    for name, (counted, rule) in found.items():
        # The rule leaves out a few numbers a token and head.
        assert abs(counted - rule) <= 0.04 * rule, (name, counted, rule)
    assert "8 h + 6 q + 6 k + 6 f bytes" in PAGE
    assert "2 q + 2 k more" in PAGE and "2 h + 5 e + 26 n" in PAGE
    assert "it keeps 2 h." in PAGE
