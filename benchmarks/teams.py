"""A program as one process, or as several ranks that work together, waiting for words.

Each process answers a word with a line of JSON; `train_step_turns.Turns` is its side. This file
does not know what the words mean.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Start:
    """How a team is started."""

    title: str  # who it is, in words
    command: Sequence[str]  # the program of each rank
    ranks: int  # processes
    threads: int  # of each rank
    cores: int  # of the machine, to which all its threads are held; its ranks share them
    python_path: str  # where its Python looks for packages first
    variables: Mapping[str, str] = field(default_factory=dict)  # more environment variables


class Team:
    """The processes of one program, waiting for a word."""

    def __init__(self, start: Start) -> None:
        """Start them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        self._title = start.title
        self._ranks = []
        with _first_cores(start.cores):
            for rank in range(start.ranks):
                process = subprocess.Popen(
                    start.command,
                    env=_environment(start, rank, port),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._ranks.append(process)

    def wait_until_ready(self) -> None:
        """Wait for the processes' first sign."""
        self._answers()

    def ask(self, word: str, arguments: Any = None) -> list[Any]:
        """Say a word to all ranks; returns their answers."""
        line = word if arguments is None else f"{word} {json.dumps(arguments)}"
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return self._answers()

    def end(self) -> None:
        """Let the processes end."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self) -> list[Any]:
        answers = []
        for process in self._ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                for other in self._ranks:
                    other.kill()
                raise SystemExit(f"{self._title} has failed; its error stands above")
            answers.append(json.loads(line))
        return answers


@contextmanager
def _first_cores(count: int) -> Iterator[None]:
    """Start processes on the first `count` cores that this process may use.

    A process inherits the cores of the thread that starts it, so none of its threads begins on
    another core.
    """
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(own)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _environment(start: Start, rank: int, port: int) -> Mapping[str, str]:
    return {
        **os.environ,
        **start.variables,
        "PYTHONPATH": start.python_path,
        "OMP_NUM_THREADS": str(start.threads),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(start.ranks),
        "LOCAL_WORLD_SIZE": str(start.ranks),
    }
