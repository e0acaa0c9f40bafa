"""Runs functions on simulated devices, for tests; the process of a test never sees a device."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0


class Devices:
    """A server of simulated devices, which has imported all that takes long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, body: str, *arguments: Any, world_size: int = 1, **environment: str) -> list[Any]:
        """Call the function `body`, "module:name", on each rank of a job.

        Args:
            arguments: such as JSON holds.
            environment: further variables of the ranks.

        Returns:
            What each rank returned.

        Raises:
            AssertionError: ranks failed, or were not done in time.
        """
        with tempfile.TemporaryDirectory() as out:
            request = {
                "body": body,
                "world_size": world_size,
                "arguments": arguments,
                "environment": environment,
                "out": out,
                "limit_s": LIMIT_S,
            }

            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()

            assert answer, "the server of simulated devices has ended"
            failures = json.loads(answer)
            assert not failures, "\n".join(failures)
            files = [Path(out) / f"{rank}.pickle" for rank in range(world_size)]

            return [pickle.loads(file.read_bytes()) for file in files]


@contextmanager
def devices() -> Iterator[Devices]:
    """Start a server, and end it after the body."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.simulated_device.server"],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    try:
        yield Devices(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
