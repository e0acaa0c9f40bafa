"""Compares steps of GRPO on episodes with a tool: ours, and TRL's trainer with environments.

    python benchmarks/episodes.py [--quick] [--json FILE]

The policy guesses a number with a tool that answers at once, or only after a while. The contenders
begin with the same policy and the same prompts, sample as many episodes of at most as many turns
and tokens, make one optimizer step with them, and go on with what they have learned:

    ours    the trainer of launch/train_ppo.py
    trl     trl.GRPOTrainer with environment_factory, in an environment that this script makes

Each is a process with two threads, or two ranks with one. They take turns in one run, a step each;
the first round is not counted. This file knows no contender's insides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from episodes_case import LEARNING_RATE, MAX_RESPONSE, ROOT, SAMPLES, write_case, write_prompts
from teams import Start, Team
from train_step_contenders import prepare_trl

HERE = Path(__file__).parent
TRL = "trl==1.16.0"
CORES = 2


@dataclass(frozen=True)
class Contender:
    """Who takes part."""

    name: str  # "ours" or "trl"
    ranks: int
    python: str = sys.executable
    options: Sequence[str] = field(default_factory=tuple)  # further arguments of its program

    @property
    def title(self) -> str:
        """Who it is, in words."""
        return " ".join([self.name, f"{self.ranks} x {CORES // self.ranks}", *self.options])

    def start(self, case: Path, prompts: Path) -> Start:
        """How its processes are started."""
        command = [self.python, str(HERE / f"episodes_{self.name}.py"), str(case), str(prompts)]
        if self.name == "trl":
            command += [f"--samples={SAMPLES}", f"--max-response={MAX_RESPONSE}"]
            command += [f"--learning-rate={LEARNING_RATE}"]
        return Start(
            title=self.title,
            command=[*command, *self.options],
            ranks=self.ranks,
            threads=CORES // self.ranks,
            cores=CORES,
            python_path="" if self.name == "trl" else str(ROOT),
            variables={"TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        )


def main() -> None:
    """Measure and print the table."""
    arguments = _arguments()
    case = arguments.work / f"after-{arguments.sft_steps}-steps"
    write_case(case, arguments.sft_steps)
    rows: list[dict[str, Any]] = []
    for seconds in arguments.delays:
        for ranks in arguments.ranks:
            rows += _measure(case, seconds, ranks, arguments)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
    for line in table(rows):
        sys.stdout.write(line + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="write all figures there too")
    add(
        "--quick",
        action="store_true",
        help="a smoke run: ours alone, one step, an untrained policy",
    )
    add("--delays", type=_list(float), default=[0.0, 0.2], help="seconds of a call of the tool")
    add("--ranks", type=_list(int), default=[1, 2], help="processes that share the two cores")
    add("--contenders", type=_list(str), default=["ours", "trl"])
    add("--prompts", type=int, default=32, help=f"of which each has {SAMPLES} samples")
    add("--repeats", type=int, default=5)
    add("--sft-steps", type=int, default=600, help="of the start policy")
    add("--also", action="append", default=[], metavar="KEY=VALUE", help="ours again, with a key")
    add("--trl-option", action="append", default=[], help="a further argument of episodes_trl.py")
    add(
        "--work",
        type=Path,
        default=ROOT / "runs" / "episodes",
        help="where start policies are kept",
    )
    add("--trl-venv", type=Path, default=ROOT / "runs" / "trl-1.16-venv", metavar="DIR")
    arguments = parser.parse_args()

    if arguments.quick:
        quick = {
            "delays": [0.01],
            "ranks": [1],
            "contenders": ["ours"],
            "prompts": 2,
            "repeats": 1,
            "sft_steps": 2,
        }
        vars(arguments).update(quick)
    return arguments


def _list(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def _measure(
    case: Path, seconds: float, ranks: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of all contenders with so many ranks and such a tool."""
    prompts = write_prompts(case, arguments.prompts, seconds)
    contenders = []
    if "ours" in arguments.contenders:
        contenders.append(Contender("ours", ranks))
    for setting in arguments.also:
        contenders.append(Contender("ours", ranks, options=[f"--set={setting}"]))
    if "trl" in arguments.contenders:
        python = prepare_trl(arguments.trl_venv, TRL)
        contenders.append(Contender("trl", ranks, python, arguments.trl_option))

    teams: list[Team] = []
    steps: list[list[dict[str, Any]]] = [[] for _ in contenders]
    try:
        for contender in contenders:
            _say(f"{seconds:g} s a call: starting {contender.title}")
            teams.append(Team(contender.start(case, prompts)))
            teams[-1].wait_until_ready()
        for number in range(arguments.repeats + 1):
            _say(f"round {number} of {arguments.repeats}")
            for team, some in zip(teams, steps, strict=True):
                some.append(_of_all_ranks(team.ask("step")))
    finally:
        for team in teams:
            team.end()

    episodes = arguments.prompts * SAMPLES
    return [
        {
            "contender": contender.name,
            "delay": seconds,
            "ranks": ranks,
            "options": list(contender.options),
            "episodes": episodes,
            "steps": some[1:],
        }
        for contender, some in zip(contenders, steps, strict=True)
    ]


def _of_all_ranks(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A step, which takes as long as on its slowest rank."""
    clock = max(answer["seconds"]["clock"] for answer in answers)
    cpu = sum(answer["seconds"]["cpu"] for answer in answers)
    return {**answers[0], "seconds": clock, "cpu_seconds": cpu}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as a table; seconds and rates are medians, the rest are means of the steps.

    The ratio compares tokens a second with ours, step by step.
    """
    lines = [
        "| s a call | contender | ranks x threads | seconds | generation | CPU-seconds | tokens/s"
        " | tokens an episode | calls | reward | ours / it |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = row["steps"]
        seconds = statistics.median(step["seconds"] for step in steps)
        generation = statistics.median(step["phases"]["gen"] for step in steps)
        cpu = statistics.median(step["cpu_seconds"] for step in steps)
        tokens = statistics.fmean(step["tokens"] for step in steps) / row["episodes"]
        calls = statistics.fmean(step["calls"] for step in steps) / row["episodes"]
        reward = statistics.fmean(step["reward"] for step in steps)
        name = " ".join([row["contender"], *row["options"]])
        lines.append(
            f"| {row['delay']:g} | {name} | {row['ranks']} x {CORES // row['ranks']}"
            f" | {seconds:.2f} | {generation:.2f} | {cpu:.2f}"
            f" | {statistics.median(_rates(row)):,.0f} | {tokens:.0f} | {calls:.2f}"
            f" | {reward:.2f} | {_ratio(row, rows)} |"
        )
    return lines


def _rates(row: dict[str, Any]) -> list[float]:
    """Tokens a second of each step."""
    return [step["tokens"] / step["seconds"] for step in row["steps"]]


def _ratio(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The median of ours over this row's rates, and its least and most."""
    for other in rows:
        same = all(other[key] == row[key] for key in ("delay", "ranks"))
        if same and other["contender"] == "ours" and not other["options"] and other is not row:
            ratios = [a / b for a, b in zip(_rates(other), _rates(row), strict=True)]
            return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    return ""


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
