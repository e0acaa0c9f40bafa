"""The contenders of `train_step.py`: how the processes of each are started.

A contender is one process, or several ranks that work together. This file does not know what is
compared.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from teams import Start

HERE = Path(__file__).parent
LAYOUTS = {"single": (1, 1), "TP2": (2, 1), "DP2": (1, 1), "PP2": (1, 2), "TP2PP2": (2, 2)}
RANKS = {"single": 1, "TP2": 2, "DP2": 2, "PP2": 2, "TP2PP2": 4}
PACKS_IN_PIPELINE = 4  # micro-batches of a mini-batch, where stages would wait for one alone
TRL = "trl==1.12.0"


@dataclass(frozen=True)
class Contender:
    """Who takes part."""

    name: str  # "ours", "before" (ours, from another checkout), "plain" or "trl"
    layout: str  # of ours, a key of `LAYOUTS`
    threads: int  # of each rank
    cores: int  # of the machine, to which all its threads are held; its ranks share them
    python: str = sys.executable  # the interpreter
    tree: Path = HERE.parent  # the checkout that it imports
    settings: Sequence[str] = field(default_factory=tuple)  # more keys of the configuration of ours

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

    def start(self, case: Path, mini_batch_tokens: int) -> Start:
        """How its processes are started."""
        return Start(
            title=self.title,
            command=self._command(case, mini_batch_tokens),
            ranks=self.ranks,
            threads=self.threads,
            cores=self.cores,
            python_path="" if self.name == "trl" else str(self.tree),
            variables={"TQDM_DISABLE": "1"},
        )

    def _command(self, case: Path, mini_batch_tokens: int) -> list[str]:
        if self.name in ("plain", "trl"):
            return [self.python, str(HERE / f"train_step_{self.name}.py"), str(case)]

        tp, pp = LAYOUTS[self.layout]
        budget = 16384 if pp == 1 else mini_batch_tokens // PACKS_IN_PIPELINE
        command = [self.python, str(HERE / "train_step_ours.py"), str(case)]
        command += [f"--tp={tp}", f"--pp={pp}", f"--micro-batch-tokens={budget}"]
        return [*command, *(f"--set={setting}" for setting in self.settings)]


def prepare_trl(directory: Path, version: str = TRL) -> str:
    """The interpreter of TRL's environment, which is made where it does not exist yet."""
    python = directory / "bin" / "python"
    ready = directory / "ready"
    if ready.is_file():
        return str(python)

    constraints = str(HERE.parent / "constraints-cpu.txt")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, stdout=sys.stderr)
    # torch comes first and alone: as a dependency, pip would pick its newest build for CUDA.
    for packages in (["torch"], [version, "transformers", "peft"]):
        command = [str(python), "-m", "pip", "install", "--quiet", "-c", constraints, *packages]
        subprocess.run(command, check=True, stdout=sys.stderr)
    ready.touch()
    return str(python)
