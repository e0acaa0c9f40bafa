"""Makes what several test files need, once for all workers of pytest-xdist.

Examples of hypothesis are the same in every run, and a slow machine may take its time over them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")

Make = Callable[[Path], object]


@pytest.fixture(scope="session")
def make_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Make], Path]:
    """Gives the directory of a name, which all processes of this run of pytest share.

    The first one that asks calls `make` with the directory; the others wait until it is filled.
    """
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent  # of the directories of all workers

    def directory_of(name: str, make: Make) -> Path:
        directory = root / f"shared-{name}"
        made = root / f"shared-{name}.made"
        with FileLock(root / f"shared-{name}.lock"):
            if not made.exists():
                shutil.rmtree(directory, ignore_errors=True)  # of a process in which it failed
                directory.mkdir()
                make(directory)
                made.touch()
        return directory

    return directory_of
