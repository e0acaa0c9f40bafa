"""Compares a PPO step and its update with the same work in plain torch and in TRL.

    python benchmarks/train_step.py [--quick] [--json FILE]

A step is 64 prompts of 32 tokens with responses of 64, in the mean; two epochs of two mini-batches;
the KL to a reference; a reward model. The contenders are

    ours    the trainer of launch/train_ppo.py, on one rank, and on several
    plain   the update with transformers and torch: padded batches, whole logits, AdamW
    trl     the PPO trainer of trl.experimental.ppo, in an environment that this script makes
    before  ours from another checkout (--before DIR)

All who use as many cores take turns in one run. Each is a process, or several ranks, that waits for
its turn. The first round is not counted. This file knows no contender.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Operations are counted by the checkout of ours, whether or not an mrlhf is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_sizes import SIZES, model_config
from teams import Team
from train_step_case import MEAN_PROMPT, MEAN_RESPONSE, Case, make_case, write_case
from train_step_contenders import LAYOUTS, RANKS, Contender, prepare_trl
from train_step_rows import limit_of, needed_operations, product_shapes, summary, table
from train_step_turns import LIMIT

from mrlhf.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure and print the tables."""
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    choices = itertools.product(arguments.sizes, arguments.dtypes, arguments.lengths)
    for size, dtype, lengths in choices:
        case = make_case(size, dtype, lengths, arguments.prompts)
        with tempfile.TemporaryDirectory() as directory:
            write_case(case, Path(directory), batches=arguments.repeats + 2)
            for cores in arguments.threads:
                rows += _measure(case, Path(directory), cores, arguments)
                if arguments.json:
                    Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")

    print("\n".join(table(rows)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="write all figures there too")
    add("--quick", action="store_true", help="a smoke run: a tiny model, ours and plain, one core")
    add("--sizes", type=_names(*SIZES), default=["3M", "26M", "110M"])
    add("--dtypes", type=_names("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--lengths", type=_names("equal", "spread"), default=["equal", "spread"])
    add("--threads", type=_numbers, default=[1, 2], help="cores; on 2, ours also runs on 2 ranks")
    add("--cases", type=_names("update", "step"), default=["update", "step"])
    add("--contenders", type=_names("ours", "plain", "trl"), default=["ours", "plain", "trl"])
    add("--layouts", type=_names(*LAYOUTS), default=list(LAYOUTS), help="of ours")
    add("--prompts", type=int, default=64)
    add("--repeats", type=int, default=5)
    add("--before", type=Path, metavar="DIR", help="a checkout that takes part as well")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of ours")
    add("--trl-venv", type=Path, default=ROOT / "runs" / "trl-venv", metavar="DIR")
    arguments = parser.parse_args()

    if arguments.quick:
        quick = {
            "sizes": ["tiny"],
            "dtypes": ["float32"],
            "lengths": ["spread"],
            "threads": [1],
            "contenders": ["ours", "plain"],
            "prompts": 8,
            "repeats": 1,
        }
        vars(arguments).update(quick)
    return arguments


def _names(*choices: str) -> Any:
    """Reads names that are separated by commas."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(choices)}")
        return names

    return read


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _contenders(cores: int, arguments: argparse.Namespace) -> Iterator[Contender]:
    """Those who take turns, on as many cores each."""
    trees = {"ours": ROOT}
    if arguments.before is not None:
        trees["before"] = arguments.before

    for name, tree in trees.items():
        for layout in arguments.layouts if "ours" in arguments.contenders else ():
            # Four ranks share two cores.
            if RANKS[layout] == 1 or cores == 2:
                threads = cores if RANKS[layout] == 1 else 1
                yield Contender(name, layout, threads, cores, tree=tree, settings=arguments.set)
    if "plain" in arguments.contenders:
        yield Contender("plain", "single", cores, cores)
    if "trl" in arguments.contenders:
        yield Contender("trl", "single", cores, cores, python=prepare_trl(arguments.trl_venv))


def _measure(
    case: Case, directory: Path, cores: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of all contenders on so many cores."""
    teams: list[tuple[Contender, Team]] = []
    mini_batch_tokens = case.mini_batch * (MEAN_PROMPT + MEAN_RESPONSE)
    try:
        for contender in _contenders(cores, arguments):
            _say(f"{case.size} {case.dtype} {case.lengths}: starting {contender.title}")
            teams.append((contender, Team(contender.start(directory, mini_batch_tokens))))
        for _, team in teams:
            team.wait_until_ready()
        measured = [_Measured(*member, case, arguments) for member in teams]
        for number in range(arguments.repeats + 1):
            _say(f"round {number} of {arguments.repeats}")
            for one in measured:
                one.take_turn(counts=number > 0)
    finally:
        for _, team in teams:
            team.end()

    run = f"{case.size} {case.dtype} {case.lengths} {cores}"
    return [row for one in measured for row in one.rows(run)]


class _Measured:
    """The measurements of one contender."""

    def __init__(
        self, contender: Contender, team: Team, case: Case, arguments: argparse.Namespace
    ) -> None:
        self._contender = contender
        self._team = team
        self._case = case
        self._cases = arguments.cases
        self._limit_seconds = 0.01 if arguments.quick else 0.15  # for each product
        family = FAMILIES["llama"]
        config = model_config(case.size).to_dict()
        self._spec = family.read_config(config, "lm")
        self._critic = family.read_config(config, "scalar")

        self._seconds: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}
        self._phases: dict[str, list[dict[str, float]]] = {}
        self._limits: list[list[list[float]]] = []

    def take_turn(self, counts: bool) -> None:
        """Have the contender do each case once, and measure its limit."""
        for word in self._contender.words(self._cases):
            answers = self._team.ask(word)
            if not counts:
                continue
            for case in answers[0]["seconds"]:
                seconds = [answer["seconds"][case] for answer in answers]
                self._seconds.setdefault(case, []).append(max(one["clock"] for one in seconds))
                self._cpu.setdefault(case, []).append(sum(one["cpu"] for one in seconds))
                self._phases.setdefault(case, []).append(answers[0].get("phases", {}))

        rows = self._case.mini_batch * (MEAN_PROMPT + MEAN_RESPONSE)
        question = {
            "shapes": product_shapes(self._spec),
            "rows": rows,
            "dtype": self._case.dtype,
            "seconds": self._limit_seconds,
        }
        self._limits.append(self._team.ask(LIMIT, question))

    def rows(self, run: str) -> Iterator[dict[str, Any]]:
        """A row for each case that was asked for; `run` names what took turns."""
        contender = self._contender
        case = self._case
        operations = needed_operations(case, self._spec, self._critic)
        cores = min(contender.cores, len(os.sched_getaffinity(0)))
        limit = limit_of(self._limits, min(1.0, cores / (contender.ranks * contender.threads)))

        for name in self._cases:
            if name not in self._seconds:
                continue
            yield {
                "contender": contender.name,
                "case": name,
                "lengths": case.lengths,
                "size": case.size,
                "dtype": case.dtype,
                "ranks": contender.ranks,
                "threads": contender.threads,
                "layout": contender.layout,
                **summary(self._seconds[name], case.tokens, operations[name], limit),
                "cpu_seconds": statistics.median(self._cpu[name]),
                "all_seconds": self._seconds[name],
                "all_cpu_seconds": self._cpu[name],
                "phases": self._phases[name],
                "gemm_limit": limit,
                "needed_operations": operations[name],
                "tokens": case.tokens,
                "settings": list(contender.settings),
                "run": run,
            }


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
