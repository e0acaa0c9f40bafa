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
