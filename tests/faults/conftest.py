"""Tiny models and data, and undisturbed runs that the disturbed ones must equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.runs import Sequel, Setting
from tests.faults.settings import write_inputs
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models, data, a user's reward function and configurations."""
    root = tmp_path_factory.mktemp("inputs")
    run_ranks(1, write_inputs, str(root))
    return root


@pytest.fixture(scope="session")
def undisturbed(
    inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Setting], Sequel]:
    """Gives the undisturbed run of a setting, which is made once."""
    runs: dict[str, Sequel] = {}

    def run_of(setting: Setting) -> Sequel:
        if setting.name not in runs:
            directory = tmp_path_factory.mktemp("undisturbed") / setting.name
            runs[setting.name] = Sequel(setting, directory)
            runs[setting.name].finish()
        return runs[setting.name]

    return run_of
