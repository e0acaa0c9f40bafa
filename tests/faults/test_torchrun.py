"""Jobs under torchrun: it starts killed ranks again, and hands on the signal that it gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.faults import faults, settings
from tests.faults.faults import Fault
from tests.faults.runs import (
    LIMIT_S,
    QUEUE_AGAIN,
    ROOT,
    Sequel,
    Undisturbed,
    assert_same_run,
)
from tests.leftovers import assert_nothing_is_left


def torchrun(run: Sequel, launcher: list[str], *sequence: Fault) -> subprocess.Popen[str]:
    """Start the run's program in two ranks, under torchrun or our launcher around it."""
    file = run.directory.with_name("faults.json")
    file.write_text(json.dumps([asdict(fault) for fault in sequence]))

    program = ["-m", "tests.faults.program", str(file), run.setting.program]
    return subprocess.Popen(
        [
            sys.executable,
            *launcher,
            "--nproc-per-node=2",
            "--standalone",
            *program,
            *run.setting.arguments,
            f"trainer.output_dir={run.directory}",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def signal_after(job: subprocess.Popen[str], file: Path, which: signal.Signals) -> tuple[int, str]:
    """Send a signal to the launcher once there is this file; returns its code and output."""
    deadline = time.monotonic() + LIMIT_S
    while not file.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(which)
    output, _ = job.communicate(timeout=LIMIT_S)
    assert f"stopped early: this job got {which.name}" in output, output
    return job.returncode, output


def test_killed_ranks_are_started_again_and_a_signal_saves(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    held, held_again = tmp_path / "held", tmp_path / "held_again"

    signals = ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout=600"]
    plain = ["-m", "torch.distributed.run", "--max-restarts=2", *signals]
    job = torchrun(
        run,
        plain,
        Fault(faults.SCORING, 2, "SIGKILL", rank=1, attempt=0),  # before the first checkpoint
        Fault(faults.ACTOR_LOSS, 16, "SIGKILL", rank=0, attempt=1),
        Fault(faults.VALUES, 2, f"TOUCH={held} HOLD", rank=1, attempt=2),  # of step 3
    )
    code, output = signal_after(job, held, signal.SIGUSR1)
    assert code != 0
    assert output.count("going on from") == 1, "it was killed twice, and had a checkpoint once"
    assert "step_000002_interrupted" in run.checkpoints, output
    assert_nothing_is_left(tmp_path)

    # The validation ends step 4.
    fault = Fault(faults.VALIDATION, 1, f"TOUCH={held_again} HOLD", rank=0)
    job = torchrun(run, ["launch/torchrun.py"], fault)
    code, output = signal_after(job, held_again, signal.SIGTERM)
    assert code == QUEUE_AGAIN, output
    assert "step_000003_interrupted" in run.checkpoints, output
    assert_nothing_is_left(tmp_path)

    run.finish()
    assert_same_run(run, undisturbed(run.setting))
