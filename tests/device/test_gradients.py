"""Linear layers add the gradients of their weights to float32 sums, if torch can."""

from __future__ import annotations

from tests.simulated_device.client import Devices


def test_gradients_of_weights_are_added_as_they_are_computed(device: Devices) -> None:
    ((without, fused),) = device.run("tests.device.gradients_here:with_and_without")
    assert without["fused"] and not any(without["fused"])
    assert fused["fused"] and all(fused["fused"])
    # bfloat16 rounds each gradient before it is added; a sum in float32 is as good as exact.
    assert fused["gap"] < 1e-5 < without["gap"] < 0.1
