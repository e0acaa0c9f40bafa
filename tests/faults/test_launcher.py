"""`launch/torchrun.py` on real processes: signals reach the workers, and their code reaches it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mrlhf.run.elastic import exit_code
from tests.faults.runs import ROOT
from tests.ports import free_ports

RANKS = 2


def launch(
    directory: Path,
    behaviour: str,
    *options: str,
    nodes: Sequence[str] = ("--standalone", f"--nproc-per-node={RANKS}"),
    worker: str = "stubborn_worker",
    log_level: str = "INFO",
) -> subprocess.Popen[str]:
    """Start two workers that behave like this."""
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "launch" / "torchrun.py"),
            *options,
            *nodes,
            "-m",
            f"tests.faults.{worker}",
            str(directory),
            behaviour,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": log_level},
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


def wait_for_the_end_of_workers(directory: Path) -> None:
    """Wait until no watched worker runs; the test's time limit ends the wait."""
    for rank in range(RANKS):
        (note,) = notes(directory, rank)
        command = Path("/proc", note.removeprefix("process "), "cmdline")
        while command.exists() and str(directory) in command.read_text():
            time.sleep(0.05)


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Wait until the launcher has said this."""
    assert process.stderr is not None
    read = []
    for line in process.stderr:
        read.append(line)
        if text in line:
            return
    raise AssertionError("".join(read))


def test_workers_get_what_libraries_read_and_the_user_wins() -> None:
    names = ("TORCH_GLOO_LAZY_INIT", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "launch/torchrun.py", "--standalone", "--no-python", "env"],
        cwd=ROOT,
        env={**environment, "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        text=True,
        capture_output=True,
        check=True,
    )
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert [variables[name] for name in names] == ["1", "2000", "1"]
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


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
    # The workers have said all that there is to say.
    assert "exitcode" not in errors and "closing signal" not in errors and "Trace" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_workers_import_is_no_failure(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = launch(tmp_path, "imports", "--max-restarts=2")
    wait_for_workers(tmp_path, process)
    process.send_signal(number)
    if number == signal.SIGTERM:  # SIGINT ends the workers at once
        (tmp_path / "go").touch()
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    ends = ["imports", "started, attempt 0", "SIGTERM", "saved"]
    assert notes(tmp_path, 1) == (ends if number == signal.SIGTERM else ["imports"])


def test_a_signal_between_two_attempts_reaches_the_next_workers(tmp_path: Path) -> None:
    # Each time that it starts workers, this launcher waits seconds for a second machine.
    nodes = (
        "--nnodes=1:2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--rdzv-conf=last_call_timeout=3",
        f"--nproc-per-node={RANKS}",
    )
    process = launch(tmp_path, "fails once", "--max-restarts=2", nodes=nodes)
    wait_for_line(process, "will restart worker group")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    for rank in range(RANKS):
        assert notes(tmp_path, rank)[-3:] == ["started, attempt 1", "SIGTERM", "saved"]


@pytest.mark.parametrize("kind", ["our launcher", "torchrun", "torchrun and a shell"])
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path, kind: str) -> None:
    program = ["tests.faults.watched_worker", str(tmp_path), "hangs"]
    arguments = ["-m", *program]
    if kind == "torchrun and a shell":
        shell = f"{sys.executable} -m {' '.join(program)}; exit 1"
        arguments = ["--no-python", "sh", "-c", shell]
    launcher = ["launch/torchrun.py"] if kind == "our launcher" else ["-m", "torch.distributed.run"]

    process = subprocess.Popen(
        [sys.executable, *launcher, "--standalone", f"--nproc-per-node={RANKS}", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    wait_for_workers(tmp_path, process)
    assert process.stdout is not None
    process.stdout.close()  # the ranks end although nobody reads what they say
    process.kill()
    process.wait()
    wait_for_the_end_of_workers(tmp_path)


def test_two_launchers_end_alike_when_one_gets_signals(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    nodes = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=one",
        "--nproc-per-node=1",
    )

    launchers = [
        launch(tmp_path, "counts", "--max-restarts=2", nodes=nodes, worker="watched_worker")
        for _ in range(2)
    ]

    wait_for_workers(tmp_path, launchers[0])
    for _ in range(3):  # the later ones change nothing
        launchers[1].send_signal(signal.SIGTERM)
    for launcher in launchers:
        _, errors = launcher.communicate()
        assert launcher.returncode == 75, errors
    wait_for_the_end_of_workers(tmp_path)


def test_workers_that_do_not_end_are_killed(tmp_path: Path) -> None:
    process = launch(tmp_path, "never ends", "--shutdown-timeout=5", "--max-restarts=2")
    wait_for_workers(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "have not ended 5 s after the signal" in errors
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
    process.communicate()
    assert process.returncode == 0


def test_bad_input_of_one_worker_ends_the_others(tmp_path: Path) -> None:
    process = launch(tmp_path, "exits with 2", "--max-restarts=1")
    _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert notes(tmp_path, 0) == ["started, attempt 0"]


@pytest.mark.parametrize("redirected", [False, True])
def test_what_a_worker_says_is_the_last_that_a_user_reads(tmp_path: Path, redirected: bool) -> None:
    options = ("--redirects=3", f"--log-dir={tmp_path}/logs") if redirected else ()
    process = launch(tmp_path, "tells and exits with 1", *options, log_level="WARNING")
    _, errors = process.communicate()
    assert process.returncode == 1
    # Where it went to a file, the launcher repeats it.
    assert errors == ("error: the cause\n" if redirected else "the cause\n")


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes = ("--nnodes=1", f"--master-port={port}", "--nproc-per-node=1")
        process = launch(tmp_path, "succeeds", nodes=nodes, log_level="WARNING")
        _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert errors.splitlines()[-1].startswith(f"error: port {port} of this machine is in use; ")
    assert "Traceback" not in errors


def test_exit_code() -> None:
    assert exit_code([75, 75]) == 75
    assert exit_code([75, -9]) == 75
    assert exit_code([75, 1]) == 1
    assert exit_code([-9]) == 1
    assert exit_code([2, 2]) == 2
    assert exit_code([2, 1]) == 2
    assert exit_code([2, -9]) == 2
    assert exit_code([-2, -9], {signal.SIGINT}) == 75
    assert exit_code([-2, 75], {signal.SIGINT}) == 75
    assert exit_code([-2, 1], {signal.SIGINT}) == 1
    assert exit_code([-2, -9], {signal.SIGTERM}) == 1
