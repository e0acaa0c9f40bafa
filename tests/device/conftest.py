"""Gives the tests of this folder simulated devices, once for each process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulated_device.client import Devices, devices
from tests.simulated_device.guard import has_compiler


@pytest.fixture(scope="session")
def device() -> Iterator[Devices]:
    """Simulated devices; skips where there is no compiler for what tells torch of them.

    A build of torch for CUDA brings what `guard.cpp` stands for, and would refuse to have it twice.
    """
    if not has_compiler():
        pytest.skip("needs g++")
    if torch.version.cuda is not None:
        pytest.skip("needs a build of torch for CPUs")
    with devices() as server:
        yield server
