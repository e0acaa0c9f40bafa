"""Runs what `make gpu-hour` asks of a small model, on the simulated device."""

from __future__ import annotations

import sys

from mrlhf.device import pick_device
from tests.simulated_device.client import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from gpu_hour_facts import operators


def taken() -> list[str]:
    """The operators of updates and decoding."""
    return operators(pick_device("auto", local_rank=0))
