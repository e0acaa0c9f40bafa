"""Compares PPO with adapters to PPO that trains all weights: seconds, memory and hand-over.

    python benchmarks/lora.py [--quick] [--json FILE]

The work is that of `train_step.py`, in float32 and with equal lengths. Actor and critic have
adapters on all linear layers. The contenders take turns in one run, each in a process with one
thread:

    full        all weights are trained
    rank 8, 32  adapters are trained
    trl         TRL's PPO trainer with peft's adapters of rank 32 on the policy; its critic is
                trained whole. It takes part if `train_step.py` has made its environment.

The seconds are those of the processor, which other programs on the machine hardly disturb, in the
median of the rounds; the first round is not counted. The bytes handed over are those of a second
run, in which two ranks of a model (TP2) give their weights to two engines that hold all of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_sizes import SIZES
from teams import Start, Team
from train_step_case import MEAN_PROMPT, MEAN_RESPONSE, Case, make_case, write_case
from train_step_contenders import HERE, Contender
from train_step_profile import print_tables

RANKS = {"full": 0, "rank 8": 8, "rank 32": 32}
TRL_RANK = 32
HEADS = (
    "model",
    "trained",
    "update, s",
    "full / this",
    "step, s",
    "full / this",
    "peak, MB",
    "gradients, MB",
    "optimizer, MB",
    "both, of full",
    "hand-over, MB",
)


def main() -> None:
    """Measure and print the tables."""
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes.split(","):
        handed_over = _handed_over(size)
        case = make_case(size, "float32", "equal", arguments.prompts)
        with tempfile.TemporaryDirectory() as directory:
            write_case(case, Path(directory), batches=arguments.repeats + 2)
            measured = _measure(case, Path(directory), arguments)
        for row in measured:
            row["hand_over"] = handed_over.get(row["trained"])
        rows += measured
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")

    has_trl = _trl_python(arguments).exists()
    remarks = [] if has_trl else ["TRL was left out: its environment is missing"]
    print_tables(table(rows), rows, *remarks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="write all figures there too")
    add("--quick", action="store_true", help="a smoke run of a tiny model")
    add("--sizes", default="26M,110M", help=f"of {', '.join(SIZES)}")
    add("--cases", default="update,step")
    add("--prompts", type=int, default=64)
    add("--repeats", type=int, default=3)
    add("--profile", action="store_true", help="say where the seconds of the updates go")
    add("--trl-venv", type=Path, default=HERE.parent / "runs" / "trl-venv", metavar="DIR")
    arguments = parser.parse_args()

    if arguments.quick:
        quick = {"sizes": "tiny", "prompts": 8, "repeats": 1, "trl_venv": Path("none")}
        vars(arguments).update(quick)
    return arguments


def _trl_python(arguments: argparse.Namespace) -> Path:
    return Path(arguments.trl_venv) / "bin" / "python"


def _contender(trained: str, layout: str) -> Contender:
    """One of ours, whose title says what it trains."""
    settings = [f"{role}.lora.rank={RANKS[trained]}" for role in ("actor", "critic")]
    return Contender(trained, layout, 1, 1, settings=settings)


def _handed_over(size: str) -> dict[str, int]:
    """Bytes that all engines together get in a hand-over, by what is trained."""
    case = make_case(size, "float32", "equal", 4)
    moved = {}
    for trained in RANKS:
        with tempfile.TemporaryDirectory() as directory:
            write_case(case, Path(directory), batches=3)
            team = Team(_contender(trained, "TP2").start(Path(directory), 256))
            try:
                team.wait_until_ready()
                team.ask("step")  # the first hand-over brought the base too
                moved[trained] = team.ask("bytes")[0]["hand_over"]
            finally:
                team.end()
    return moved


def _starts(case: Case, directory: Path, arguments: argparse.Namespace) -> Iterator[Start]:
    """How those who take turns are started."""
    mini_batch_tokens = case.mini_batch * (MEAN_PROMPT + MEAN_RESPONSE)
    for trained in RANKS:
        yield _contender(trained, "single").start(directory, mini_batch_tokens)

    python = _trl_python(arguments)
    if python.exists():
        command = [str(python), str(HERE / "train_step_trl.py"), str(directory), str(TRL_RANK)]
        yield Start("trl", command, ranks=1, threads=1, cores=1, python_path="")


def _measure(case: Case, directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each contender."""
    teams: dict[str, Team] = {}
    rows: dict[str, dict[str, Any]] = {}
    words = arguments.cases.split(",")
    try:
        names = [*RANKS, "trl"]
        for name, start in zip(names, _starts(case, directory, arguments), strict=False):
            sys.stderr.write(f"{case.size}: starting {start.title}\n")
            teams[name] = Team(start)
            teams[name].wait_until_ready()
            rows[name] = {"size": case.size, "trained": name, "seconds": {}}

        for number in range(arguments.repeats + 1):
            sys.stderr.write(f"round {number} of {arguments.repeats}\n")
            for name, team in teams.items():
                _take_turn(team, ["step"] if name == "trl" else words, rows[name], number > 0)

        for name in RANKS:
            rows[name] |= {"bytes": teams[name].ask("bytes")[0]}
            if arguments.profile:
                profile = teams[name].ask("profile")[0]
                rows[name] |= {"title": f"{case.size} {name}", "profile": profile}
    finally:
        for team in teams.values():
            team.end()
    return list(rows.values())


def _take_turn(team: Team, words: Sequence[str], row: dict[str, Any], counts: bool) -> None:
    """Have one contender do the work once, and note its figures in its row."""
    for word in words:
        answer = team.ask(word)[0]
        row["peak_bytes"] = answer["peak_bytes"]
        for case, seconds in answer["seconds"].items():
            if counts:
                row["seconds"].setdefault(case, []).append(seconds["cpu"])


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as lines of a table."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for row in rows:
        full = next(
            other for other in rows if (other["size"], other["trained"]) == (row["size"], "full")
        )
        cells = [row["size"], row["trained"]]
        for case in ("update", "step"):
            cells += _seconds(row, full, case)
        cells.append(_megabytes(row["peak_bytes"]))
        cells += _bytes(row, full)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _seconds(row: Mapping[str, Any], full: Mapping[str, Any], case: str) -> list[str]:
    """The median, and how often it fits into that of full training."""
    if case not in row["seconds"] or case not in full["seconds"]:
        return ["", ""]
    own = statistics.median(row["seconds"][case])
    return [f"{own:.2f}", f"{statistics.median(full['seconds'][case]) / own:.2f}"]


def _bytes(row: Mapping[str, Any], full: Mapping[str, Any]) -> list[str]:
    """Those of gradients and optimizer, their share of full training's, and of the hand-over."""
    if "bytes" not in row:
        return ["", "", "", ""]
    kinds = ("grads", "optimizer")
    own = [row["bytes"][kind] for kind in kinds]
    share = sum(own) / sum(full["bytes"][kind] for kind in kinds)
    return [*map(_megabytes, own), f"{share:.1%}", _megabytes(row["hand_over"])]


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f}"


if __name__ == "__main__":
    main()
