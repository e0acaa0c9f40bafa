"""`launch/torchrun.py` on real processes: signals reach the workers, and their code reaches it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mrlhf.run.elastic import exit_code
from tests.e2e.programs import ROOT

pytestmark = pytest.mark.timeout(120)
RANKS = 2


def launch(directory: Path, behaviour: str, *options: str) -> subprocess.Popen[str]:
    """Start two workers that behave like this."""
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "launch" / "torchrun.py"),
            *options,
            "--standalone",
            f"--nproc-per-node={RANKS}",
            str(ROOT / "tests" / "faults" / "stubborn_worker.py"),
            str(directory),
            behaviour,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def notes(directory: Path, rank: int) -> list[str]:
    """What a worker has noted."""
    file = directory / f"rank_{rank}.txt"
    return file.read_text().splitlines() if file.exists() else []


def wait_for_workers(directory: Path, process: subprocess.Popen[str]) -> None:
    """Wait until all workers take signals."""
    while not all(notes(directory, rank) for rank in range(RANKS)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_workers_save_on_a_signal_and_the_job_asks_to_be_queued_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    # A restart would be wrong: the workers have not failed.
    process = launch(tmp_path, "saves", "--max-restarts=2")
    wait_for_workers(tmp_path, process)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    for rank in range(RANKS):
        assert notes(tmp_path, rank) == ["started, attempt 0", number.name, "saved"]


def test_workers_that_do_not_end_are_killed(tmp_path: Path) -> None:
    process = launch(tmp_path, "never ends", "--stop-timeout", "1", "--max-restarts=2")
    wait_for_workers(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "have not ended 1 s after the signal" in errors
    assert notes(tmp_path, 0) == ["started, attempt 0", "SIGTERM"]


def test_a_failure_is_tried_again_and_then_ends_the_job(tmp_path: Path) -> None:
    process = launch(tmp_path, "exits with 3", "--max-restarts=1")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "exitcode  : 3" in errors
    assert notes(tmp_path, 1) == ["started, attempt 0", "started, attempt 1"]
    assert "SIGTERM" not in notes(tmp_path, 0)  # it would have waited for the other for long


def test_bad_input_and_success_are_final(tmp_path: Path) -> None:
    process = launch(tmp_path, "all exit with 2", "--max-restarts=1")
    process.communicate()
    assert process.returncode == 2
    assert notes(tmp_path, 1) == ["started, attempt 0"]

    process = launch(tmp_path, "succeeds")
    assert process.wait() == 0


def test_exit_code() -> None:
    assert exit_code([75, 75]) == 75
    assert exit_code([75, -9]) == 75
    assert exit_code([75, 1]) == 1
    assert exit_code([-9]) == 1
    assert exit_code([2, 2]) == 2
    assert exit_code([2, 75]) == 1
