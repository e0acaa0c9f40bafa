"""Traces of chosen steps, and what a rank leaves when its GPU has no memory left."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrlhf.config.trainer import ProfileSection
from mrlhf.parallel.phases import Phases
from mrlhf.run.profiles import Profiles


def _events(file: Path) -> set[str]:
    trace = json.loads(gzip.decompress(file.read_bytes()))
    return {event.get("name", "") for event in trace["traceEvents"]}


def test_the_chosen_steps_of_a_chosen_rank_are_traced(tmp_path: Path) -> None:
    phases = Phases()
    section = ProfileSection(steps=[2, 3], ranks=[1])
    for rank in (0, 1):
        profiles = Profiles(section, "cpu", rank, tmp_path)
        for step in (1, 2):
            with profiles.of_step(step), phases.enter("update_actor"):
                torch.ones(4, 4) @ torch.ones(4, 4)

    [file] = (tmp_path / "profiles").iterdir()
    assert file.name == "step_000002_rank_1.json.gz"
    assert {"update_actor", "aten::matmul"} <= _events(file)

    # Step 2 is done again after a resume; step 3 is interrupted.
    with profiles.of_step(2):
        torch.ones(4).exp()
    assert "update_actor" not in _events(file) and "aten::exp" in _events(file)
    with pytest.raises(KeyboardInterrupt), profiles.of_step(3):
        raise KeyboardInterrupt
    assert [*(tmp_path / "profiles").iterdir()] == [file]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file, where the directory should be")
    with Profiles(ProfileSection(steps=[1]), "cpu", 0, tmp_path).of_step(1):
        pass
    assert "step 1 is not traced: " in caplog.text


def test_a_trace_without_room_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files is as a full disk, but holds for a whole process."""
    script = """
import resource, signal, sys, tempfile
from pathlib import Path
import torch
from mrlhf.config.trainer import ProfileSection
from mrlhf.run.profiles import Profiles

tempfile.tempdir = sys.argv[1] + "/temporary"
limit = int(sys.argv[2])
with Profiles(ProfileSection(steps=[1]), "cpu", 0, Path(sys.argv[1])).of_step(1):
    for _ in range(1000):
        torch.ones(4).exp()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
"""
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", script, str(tmp_path), "10000"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0
    assert "step 1 is not traced: torch could not write it" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_stacks_name_lines_of_python(tmp_path: Path) -> None:
    with Profiles(ProfileSection(steps=[1], stacks=True), "cpu", 0, tmp_path).of_step(1):
        torch.ones(4).exp()
    assert any("test_profiles.py" in name for name in _events(*(tmp_path / "profiles").iterdir()))


def test_memory_is_written_down_when_a_gpu_has_none_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert Profiles(None, "cpu", 0, tmp_path).after(error) == ""

    asked: dict[str, object] = {}
    monkeypatch.setattr(torch._C, "_cuda_record_memory_history", None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", asked.update)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_bytes(b"memory")
    )
    profiles = Profiles(None, "cuda", 3, tmp_path)
    assert asked == {"stacks": "python", "max_entries": 50_000}
    assert profiles.after(RuntimeError("another")) == ""
    file = tmp_path / "profiles" / "out_of_memory_rank_3.pickle"
    assert str(file) in profiles.after(error) and file.read_bytes() == b"memory"
