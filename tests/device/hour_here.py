"""Runs what `make gpu-hour` asks of a small model, on the simulated device."""

from __future__ import annotations

import sys
from typing import Any

from mrlhf.device import pick_device
from tests.device import measures
from tests.simulated_device.client import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import gpu
from gpu_hour_facts import operators


def taken() -> list[str]:
    """The operators of updates and decoding."""
    return operators(pick_device("auto", local_rank=0))


def rows() -> list[dict[str, Any]]:
    """What is measured of memory of the host, and of the host's work for a pass."""
    measures.join()
    device = pick_device("auto", local_rank=0)
    return [row for measure in (gpu.offload, gpu.mixed) for row in measure("tiny", device)]
