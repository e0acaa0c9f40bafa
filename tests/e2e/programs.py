"""Starts the launchers and tools as a user does, in new processes, and reads what they write."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.faults.runs import Program, start

ROOT = Path(__file__).parents[2]


def run_program(
    arguments: list[str], timeout: float = 600.0, cwd: Path = ROOT
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


def torchrun(
    ranks: int, arguments: list[str], timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Run a launcher in `ranks` processes on a free port."""
    return run_program(
        ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", *arguments],
        timeout,
    )


def train(program: Program, ranks: int, arguments: list[str], logs: Path) -> str:
    """Run the launcher of `program` as `torchrun` does, but in forks; returns its output.

    They are forks of a server that has imported torch, which takes each rank seconds anew. Tests of
    the demo and of several pages use torchrun itself.
    """
    ended = start(program, arguments, logs, world_size=ranks).wait(limit_s=900.0)
    assert ended.codes == [0] * ranks, ended.text[-8000:]
    return ended.text


def python_command(page: str) -> list[str]:
    """The arguments of the one `python ...` command of a page, whose lines may end with a `\\`."""
    (command,) = re.findall(r"^python ((?:.+\\\n)*.+)$", page, re.MULTILINE)
    return shlex.split(command.replace("\\\n", " "))


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    """Assert that the program has succeeded, and return its output of both streams."""
    assert done.returncode == 0, (
        f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    )
    return done.stdout + done.stderr


def read_lines(file: Path) -> list[Any]:
    """The JSON value of each line."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
