"""A run that is traced has the numbers of one that is not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import settings
from tests.faults.runs import Sequel, Setting, assert_same_run


@pytest.mark.parametrize("make", [settings.ppo, settings.dpo])
def test_a_traced_run_is_the_same(
    make: Callable[[Path], Setting],
    inputs: Path,
    undisturbed: Callable[[Setting], Sequel],
    tmp_path: Path,
) -> None:
    run = Sequel(make(inputs), tmp_path / "run")
    run.finish(keys=["trainer.profile.steps=[2]", "trainer.profile.ranks=[0,1]"])
    assert_same_run(run, undisturbed(run.setting))

    files = sorted((run.directory / "profiles").iterdir())
    assert [file.name for file in files] == [f"step_000002_rank_{rank}.json.gz" for rank in (0, 1)]
    for file in files:
        trace = json.loads(gzip.decompress(file.read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        phases = {"gen", "update_actor", "values"} if run.setting.program == "ppo" else set()
        assert {"step", *phases} <= names
