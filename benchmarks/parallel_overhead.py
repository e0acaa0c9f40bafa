"""Measures what each axis of parallelism costs: one update on 1, 2 and 4 ranks, of equal work.

    python benchmarks/parallel_overhead.py [--quick] [--json FILE]

An update is one optimizer step of supervised fine-tuning on one mini-batch, which is the same on
every layout; so is the loss, or the benchmark fails. Each number of ranks is started once and holds
a model in every layout. All layouts take turns, with one thread a rank. The first round is not
counted; figures are medians. The ranks share the machine's cores: with fewer cores than ranks, a
rank also waits for a core, and `CPU-seconds` say how much work there is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from parallel_overhead_case import QUICK, Case, Layout, layouts, write_case
from teams import Start, Team

HERE = Path(__file__).resolve().parent
HEADS = (
    "model",
    "ranks",
    "axes",
    "seconds",
    "x one rank",
    "CPU-seconds",
    "x one rank",
    "seconds waiting",
    "of the update",
)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny models, 2 ranks")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    arguments = parser.parse_args()

    case = QUICK if arguments.quick else Case()
    numbers = [1, 2] if arguments.quick else [1, 2, 4]
    repeats = 1 if arguments.quick else arguments.repeats
    rows = _measure(case, numbers, repeats)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")

    print("\n".join(table(rows)))
    print(f"\n{platform.processor() or platform.machine()}, torch {torch.__version__}")


def _measure(case: Case, numbers: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each layout on each number of ranks."""
    teams: dict[int, Team] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_case(case, Path(directory))
        try:
            for ranks in numbers:
                teams[ranks] = Team(_start(ranks, directory))
            for team in teams.values():
                team.wait_until_ready()

            measured = [
                _Measured(layout, ranks, number, team)
                for ranks, team in teams.items()
                for number, layout in enumerate(layouts(ranks, case))
            ]
            for number in range(repeats + 1):
                sys.stderr.write(f"round {number} of {repeats}\n")
                for one in measured:
                    one.take_turn(counts=number > 0)
            for one in measured:
                one.take_profile()
        finally:
            for team in teams.values():
                team.end()

    rows = [one.row() for one in measured]
    _require_equal_losses(rows)
    return rows


def _start(ranks: int, directory: str) -> Start:
    return Start(
        title=f"{ranks} ranks",
        command=[sys.executable, str(HERE / "parallel_overhead_rank.py"), directory],
        ranks=ranks,
        threads=1,
        cores=len(os.sched_getaffinity(0)),
        python_path=str(HERE.parent),
    )


class _Measured:
    """The measurements of one layout."""

    def __init__(self, layout: Layout, ranks: int, number: int, team: Team) -> None:
        self._layout = layout
        self._ranks = ranks
        self._number = number
        self._team = team
        self._seconds: list[float] = []
        self._cpu: list[float] = []
        self._losses: list[float] = []
        self._profile: list[dict[str, float]] = []

    def take_turn(self, counts: bool) -> None:
        """Take one optimizer step."""
        answers = self._team.ask(f"update:{self._number}")
        self._losses.append(answers[0]["loss"])
        if counts:
            self._seconds.append(max(answer["seconds"]["clock"] for answer in answers))
            self._cpu.append(sum(answer["seconds"]["cpu"] for answer in answers))

    def take_profile(self) -> None:
        """Profile one optimizer step on every rank."""
        self._profile = self._team.ask(f"profile:{self._number}")

    def row(self) -> dict[str, Any]:
        """All figures."""
        waiting = statistics.mean(rank["waiting"] / rank["total"] for rank in self._profile)
        return {
            "model": self._layout.model,
            "ranks": self._ranks,
            "axes": self._layout.axes,
            "keys": self._layout.keys,
            "seconds": statistics.median(self._seconds),
            "cpu_seconds": statistics.median(self._cpu),
            "waiting": waiting,
            "losses": self._losses,
            "all_seconds": self._seconds,
            "all_cpu_seconds": self._cpu,
            "profile_of_ranks": self._profile,
        }


def _require_equal_losses(rows: Sequence[Mapping[str, Any]]) -> None:
    """Stop unless all layouts of a model have computed the same."""
    first: dict[str, list[float]] = {}
    for row in rows:
        losses = first.setdefault(row["model"], row["losses"])
        for own, other in zip(row["losses"], losses, strict=True):
            if abs(own - other) > 1e-4 * other:
                raise SystemExit(
                    f"{row['model']}, {row['axes']} on {row['ranks']} ranks has the loss {own}, "
                    f"and on one rank {other}"
                )


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as lines of a table; the first row of a model is its one rank."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    alone: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        one = alone.setdefault(row["model"], row)
        cells = [
            row["model"],
            str(row["ranks"]),
            row["axes"],
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / one['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['cpu_seconds'] / one['cpu_seconds']:.2f}",
            f"{row['waiting'] * row['seconds']:.2f}",
            f"{row['waiting']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
