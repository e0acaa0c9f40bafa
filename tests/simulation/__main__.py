"""Runs the start and one step of each rank that differs from the others, and prints what it held.

Usage: python -m tests.simulation --config FILE [--config FILE ...] --gpus N [--gpu h100|FILE]
                                  [key.path=value ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mrlhf.commands.endings import end_command
from mrlhf.config.load import read_any
from mrlhf.config.roots import PROGRAMS
from mrlhf.errors import ConfigError
from mrlhf.log import quiet_transformers
from mrlhf.planning.gpus import gpu_of
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models
from tests.simulation.job import simulate
from tests.simulation.words import exchange_table, memory_table, problems


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    add = parser.add_argument
    add("--config", action="append", metavar="FILE", required=True, help="the run")
    add("--program", choices=list(PROGRAMS), help="what it is for (default: found out)")
    add("--gpus", type=int, metavar="N", required=True, help="how many ranks the job has")
    add("--gpu", default="h100", metavar="KIND", help="a kind of GPU, or a YAML file")
    add("--reserve-gb", type=float, default=10.0, metavar="GB", help="left free on each GPU")
    add("overrides", nargs="*", metavar="key.path=value", help="keys of the run")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if each rank gets to the end of a step and fits, 1 if one does not, 2 on bad input."""
    options = parse(arguments)
    quiet_transformers()
    return end_command(lambda: _simulate(options), Path("."))


def _simulate(options: argparse.Namespace) -> int:
    gpu = gpu_of(options.gpu)
    overrides = [*options.overrides, f"distributed.device={gpu.device}"]
    config = read_any(options.program, options.config, overrides)
    found = check_models(config)
    missing = [name for name, spec in found.items() if spec is None]
    if missing:
        raise ConfigError(f"the model of {', '.join(missing)} has no config.json")
    specs = {name: spec for name, spec in found.items() if spec is not None}

    ranks = []
    for rank in simulate(config, specs, options.gpus, gpu.per_machine):
        print(f"rank {rank.rank}: {rank.groups} process groups, simulated in {rank.seconds:.0f} s")
        ranks.append(rank)
    print(f"the other {options.gpus - len(ranks)} of {options.gpus} ranks are like one of these")
    print("\n".join(memory_table(config, ranks, footprint(config, specs, options.gpus))))
    print("\n".join(exchange_table(max(ranks, key=lambda rank: sum(rank.nbytes.values())))))

    room = int((gpu.memory_gb - options.reserve_gb) * 1e9)
    lacking = list(problems(ranks, room))
    print("\n".join(lacking) or f"every rank gets to the end of a step, and fits {gpu.name}")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
