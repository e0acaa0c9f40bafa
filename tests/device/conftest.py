"""Gives the tests of this folder simulated devices, once for each process of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated_device.client import Devices, devices
from tests.simulated_device.guard import has_compiler


@pytest.fixture(scope="session")
def device() -> Iterator[Devices]:
    """Simulated devices; skips where there is no compiler for what tells torch of them."""
    if not has_compiler():
        pytest.skip("needs g++")
    with devices() as server:
        yield server
