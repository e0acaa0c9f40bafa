"""Jobs under torchrun: it starts killed ranks again, and hands on the SIGTERM that it gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults import faults, settings
from tests.faults.faults import Fault
from tests.faults.runs import LIMIT_S, Sequel, Setting, assert_nothing_is_left, assert_same_run

pytestmark = pytest.mark.timeout(300)
Undisturbed = Callable[[Setting], Sequel]
ROOT = Path(__file__).parents[2]


def torchrun(run: Sequel, max_restarts: int, *sequence: Fault) -> subprocess.Popen[str]:
    """Start the run's launcher under torchrun in two ranks."""
    file = run.directory.with_name("faults.json")
    file.write_text(json.dumps([asdict(fault) for fault in sequence]))
    options = ["--nproc-per-node=2", "--standalone", f"--max-restarts={max_restarts}"]
    setting = run.setting
    program = ["-m", "tests.faults.program", str(file), setting.program, *setting.arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *program]
        + [f"trainer.output_dir={run.directory}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_killed_ranks_are_started_again_and_a_sigterm_saves(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    job = torchrun(
        run,
        2,
        Fault(faults.SCORING, 2, "SIGKILL", rank=1, attempt=0),  # before the first checkpoint
        Fault(faults.ACTOR_LOSS, 16, "SIGKILL", rank=0, attempt=1),
        Fault(faults.CRITIC_LOSS, 10, "HOLD", rank=1, attempt=2),
    )
    saved = run.directory / "checkpoints" / "step_000002"
    deadline = time.monotonic() + LIMIT_S
    while not saved.is_dir() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert "stopped early: this job got SIGTERM" in output, output
    assert_nothing_is_left(tmp_path)
    assert any(name.endswith("_interrupted") for name in run.checkpoints), run.checkpoints

    job = torchrun(run, 0)
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert_nothing_is_left(tmp_path)
    assert_same_run(run, undisturbed(run.setting))
