"""Tiny models and data, and undisturbed runs that the disturbed ones must equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.runs import Sequel, Setting
from tests.faults.settings import write_inputs
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def inputs(make_once: Callable[..., Path]) -> Path:
    """A directory with models, data, a user's reward function and configurations."""
    return make_once("inputs", lambda root: run_ranks(1, write_inputs, str(root)))


@pytest.fixture(scope="session")
def undisturbed(inputs: Path, make_once: Callable[..., Path]) -> Callable[[Setting], Sequel]:
    """Gives the undisturbed run of a setting, which is made once."""

    def run_of(setting: Setting) -> Sequel:
        root = make_once(
            f"undisturbed-{setting.name}", lambda root: Sequel(setting, root / "run").finish()
        )
        return Sequel(setting, root / "run")

    return run_of
