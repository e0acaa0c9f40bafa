"""The contenders of `train_step.py` as processes: how each is started, asked and ended.

A contender is one process, or several ranks that work together. This file does not know what is
compared.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LAYOUTS = {"single": (1, 1), "TP2": (2, 1), "DP2": (1, 1), "PP2": (1, 2), "TP2PP2": (2, 2)}
RANKS = {"single": 1, "TP2": 2, "DP2": 2, "PP2": 2, "TP2PP2": 4}
PACKS_IN_PIPELINE = 4  # micro-batches of a mini-batch, where stages would wait for one alone
TRL = "trl==1.8.0"


@dataclass(frozen=True)
class Contender:
    """Who takes part.

    Attributes:
        name: "ours", "before" (ours, from another checkout), "plain" or "trl".
        layout: of ours, a key of `LAYOUTS`.
        threads: of each rank.
        cores: of the machine, to which all its threads are held; its ranks share them.
        python: the interpreter.
        tree: the checkout that it imports.
        settings: more keys of the configuration of ours.
    """

    name: str
    layout: str
    threads: int
    cores: int
    python: str = sys.executable
    tree: Path = HERE.parent
    settings: Sequence[str] = field(default_factory=tuple)

    @property
    def ranks(self) -> int:
        """Processes."""
        return RANKS[self.layout]

    @property
    def title(self) -> str:
        """Who it is, in words."""
        return f"{self.name} {self.layout}, {self.threads} threads a rank"

    def words(self, cases: Sequence[str]) -> list[str]:
        """What to ask for to have these cases measured."""
        if self.name == "trl":
            return ["step"]  # its answer holds the update too
        if self.name == "plain":
            return [case for case in cases if case == "update"]
        return list(cases)

    def command(self, case: Path, mini_batch_tokens: int) -> list[str]:
        """The program of one rank."""
        if self.name in ("plain", "trl"):
            return [self.python, str(HERE / f"train_step_{self.name}.py"), str(case)]

        tp, pp = LAYOUTS[self.layout]
        budget = 16384 if pp == 1 else mini_batch_tokens // PACKS_IN_PIPELINE
        command = [self.python, str(HERE / "train_step_ours.py"), str(case)]
        command += [f"--tp={tp}", f"--pp={pp}", f"--micro-batch-tokens={budget}"]
        return [*command, *(f"--set={setting}" for setting in self.settings)]


class Team:
    """The processes of one contender, waiting for a word."""

    def __init__(self, contender: Contender, case: Path, mini_batch_tokens: int) -> None:
        """Start them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        self.contender = contender
        self._ranks = []
        with _first_cores(contender.cores):
            for rank in range(contender.ranks):
                process = subprocess.Popen(
                    contender.command(case, mini_batch_tokens),
                    env=_environment(contender, rank, port),
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
                raise SystemExit(f"{self.contender.title} has failed; its error stands above")
            answers.append(json.loads(line))
        return answers


def prepare_trl(directory: Path) -> str:
    """The interpreter of TRL's environment, which is made where it does not exist yet."""
    python = directory / "bin" / "python"
    ready = directory / "ready"
    if ready.is_file():
        return str(python)

    constraints = str(HERE.parent / "constraints-cpu.txt")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, stdout=sys.stderr)
    # torch comes first and alone: as a dependency, pip would pick its newest build for CUDA.
    for packages in (["torch"], [TRL, "transformers"]):
        command = [str(python), "-m", "pip", "install", "--quiet", "-c", constraints, *packages]
        subprocess.run(command, check=True, stdout=sys.stderr)
    ready.touch()
    return str(python)


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


def _environment(contender: Contender, rank: int, port: int) -> Mapping[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": "" if contender.name == "trl" else str(contender.tree),
        "TQDM_DISABLE": "1",
        "OMP_NUM_THREADS": str(contender.threads),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(contender.ranks),
        "LOCAL_WORLD_SIZE": str(contender.ranks),
    }
