"""Starts the launchers and tools as a user does, in new processes, and reads what they write."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.metric_rows import without_row

ROOT = Path(__file__).parents[2]
LIMIT_S = 3000.0  # a program that takes as long hangs; pytest's own limit is a little longer


def run_program(
    arguments: list[str], timeout: float = LIMIT_S, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a Python program of the project, and capture its output as text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_commands(
    commands: Sequence[str],
    *more: str,
    cwd: Path = ROOT,
    timeout: float = LIMIT_S,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run commands of a page as a shell does, up to the first one that fails.

    Args:
        commands: as the page has them.
        more: arguments that are added to the last one.
        cwd: where they run.
        timeout: seconds for all of them.
        variables: further environment variables.
    """
    script = " ".join(["\n".join(commands), *map(shlex.quote, more)])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PET_STANDALONE": "1",  # torchrun takes a free port
        "PYTHONPATH": str(ROOT),
        **(variables or {}),
    }

    return subprocess.run(
        ["bash", "-ec", script],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def torchrun(
    ranks: int, arguments: list[str], timeout: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a launcher in `ranks` processes on a free port."""
    return run_program(
        ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", *arguments],
        timeout,
    )


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    """Assert that the program has succeeded, and return its output of both streams."""
    assert done.returncode == 0, (
        f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    )
    return done.stdout + done.stderr


def read_lines(file: Path) -> list[Any]:
    """The JSON value of each line. Each metric of a run must have its row in the table."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if file.name == "metrics.jsonl":
        assert without_row({name for line in lines for name in line}) == []
    return lines


@contextmanager
def on_terminal(
    command: list[str], cwd: Path, variables: Mapping[str, str], with_output: bool
) -> Iterator[tuple[subprocess.Popen[bytes], list[bytes]]]:
    """Start a command on a terminal, which gets its errors, and its output too if asked for.

    At the end, whatever the command has started is ended.

    Yields:
        The process, and what the terminal gets, which is whole afterwards.
    """
    screen: list[bytes] = []
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150", **variables},
        stdout=end if with_output else subprocess.DEVNULL,
        stderr=end,
        start_new_session=True,
    )

    os.close(end)
    reader = threading.Thread(target=_read_terminal, args=(terminal, screen))
    reader.start()
    try:
        yield process, screen
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()


def _read_terminal(terminal: int, screen: list[bytes]) -> None:
    """Read what a terminal gets until nobody writes to it any more; `screen` takes it."""
    with suppress(OSError):
        while part := os.read(terminal, 4096):
            screen.append(part)
    os.close(terminal)
