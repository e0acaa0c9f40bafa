"""Runs programs and reads their metrics, for recipes that compare methods over seeds.

It does not know what is compared.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run(program: str, arguments: Sequence[str]) -> None:
    """Run a program on two ranks, generation on one, and end with its output if it fails."""
    ranks = [] if program == "generate" else ["-n", "2"]
    command = [sys.executable, "-m", "mrlhf", program, *ranks, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def read(out: Path) -> list[dict[str, float]]:
    """The metrics of each step of a run; of step 0, those before the first one."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(head: Sequence[str], rows: dict[str, Sequence[str]]) -> str:
    """A table of Markdown: the cells of each row by its name."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    return "\n".join(lines)


def spread(numbers: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation; the number if it is one alone, a dash for none."""
    if not numbers:
        return "—"
    mean = f"{statistics.mean(numbers):.{digits}f}"
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean
