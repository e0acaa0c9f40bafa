"""Runs the checks of `tests/gpu` on the simulated device, in one job."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import transformers

from tests.gpu.checks import CHECKS, prepared
from tests.simulated_device.state import DEVICE


def names() -> list[str]:
    """The names of all checks."""
    return list(CHECKS)


def run(wanted: list[str]) -> dict[str, dict[str, Any]]:
    """Run checks; by name their figures, seconds and counts. A check that fails raises."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = {}
    with tempfile.TemporaryDirectory() as root, prepared("auto", Path(root)) as place:
        assert place.device == DEVICE.device
        for name in wanted:
            began = time.perf_counter()
            with DEVICE.counted() as counts:
                figures = CHECKS[name](place)
            seconds = time.perf_counter() - began
            found[name] = {"figures": figures, "seconds": seconds, "counts": counts}
    return found
