"""The engine draws the same tokens on the simulated device as on the host, with every option."""

from __future__ import annotations

from tests.simulated_device.client import Devices


def test_samples_are_those_of_the_host(device: Devices) -> None:
    (found,) = device.run("tests.device.sampling_here:compare")
    assert len(found) == 20
    for name, row in found.items():
        # A token on the edge between two may be drawn otherwise after another rounding.
        assert row["same"] >= 0.8, (name, row)
        assert row["gap"] < 1e-4, (name, row)
        assert not row["never"], (name, row)
    assert found["stop strings, graphs"]["lengths"][0] < 10
