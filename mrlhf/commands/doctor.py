"""Looks over a machine, its ranks, a model and a configuration, before a run is started.

Usage: mrlhf doctor [--out DIR] [--model DIR] [--json FILE]
                    [--config FILE [--config FILE ...] [key.path=value ...] [--world-size N]]
       mrlhf torchrun --nproc-per-node=N -m mrlhf doctor
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from mrlhf.commands.endings import end_command
from mrlhf.config.load import read_any
from mrlhf.config.roots import PROGRAMS, AnyConfig
from mrlhf.data.hub import local_directory
from mrlhf.device import device_kind, pick_device
from mrlhf.doctor import data, machine, model
from mrlhf.doctor.findings import Finding, examine, in_words, ok
from mrlhf.inputs.paths import with_local_inputs
from mrlhf.log import quiet_transformers
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.parallel.job import init_distributed, read_place
from mrlhf.preflight import dry_run
from mrlhf.printable import show
from mrlhf.version import add_version_option

Groups = list[tuple[str, list[Finding]]]
_TIMEOUT_S = 60.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Look over this machine, and over a model and a configuration if they are "
        "named. 'broken' would stop a run; 'look' may be meant. Exit code: 1 if something is "
        "broken. Started by torchrun, it also looks at the ranks and the links between them."
    )
    add_version_option(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("."), metavar="DIR", help="where runs will write")
    add("--model", metavar="DIR", help="a model: weights, tokenizer, chat template")
    add("--config", action="append", metavar="FILE", help="a run: its data, reward and layout")
    add("--program", choices=list(PROGRAMS), help="what that is for (default: found out)")
    add("--world-size", type=int, metavar="N", help="ranks of that run (default: the fewest)")
    add("--json", type=Path, metavar="FILE", help="also write the findings there")
    add("overrides", nargs="*", metavar="key.path=value", help="keys of that run")

    options = parser.parse_intermixed_args(arguments)
    if options.overrides and not options.config:
        parser.error(f"{options.overrides[0]}: keys go with --config")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Look and tell; 0 if nothing is broken, 1 if something is, 2 on bad input."""
    options = parse(arguments)
    quiet_transformers()
    return end_command(lambda: _look(options), options.json or options.out)


def _look(options: argparse.Namespace) -> int:
    groups = _job_and_ranks(options.out) if "RANK" in os.environ else []
    if groups is None:
        return 0  # rank 0 tells
    groups += _here(options)

    show(in_words(groups))
    if "RANK" not in os.environ:
        show("not looked at: links between ranks; start it by torchrun for that (--help)")
    findings = [finding for _, found in groups for finding in found]
    if options.json is not None:
        lines = [{"group": group, **asdict(each)} for group, found in groups for each in found]
        options.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    return int(any(finding.level == "broken" for finding in findings))


def _here(options: argparse.Namespace) -> Groups:
    """What this process alone looks at."""
    groups = [("machine", examine("machine", lambda: machine.machine(options.out)))]
    if options.model is not None:
        directory = local_directory(options.model)
        found = examine("model", lambda: model.model(Path(directory)))
        groups.append((f"model {directory}", found))

    if options.config:
        given = read_any(options.program, options.config, options.overrides)
        config, _, _ = with_local_inputs(given, {}, weights=False)
        look: dict[str, Callable[[], Iterable[Finding]]] = {
            "data": lambda: data.data(config),
            "layout": lambda: _layout(config, options.world_size),
        }
        said: set[str] = set()  # the dry run warns of data too
        for name, check in look.items():
            found = [finding for finding in examine(name, check) if finding.seen not in said]
            said |= {finding.seen for finding in found}
            groups.append((f"{name} of {', '.join(options.config)}", found))
    return groups


def _layout(config: AnyConfig, world_size: int | None) -> Iterator[Finding]:
    result = dry_run(config, world_size)
    for line in result.missing:
        yield Finding("broken", "files", f"not found: {line}")
    lines = result.text.splitlines()
    for line in lines:
        if line.startswith("memory of "):
            yield ok("memory", line)
    yield ok("layout", lines[-1])


def _job_and_ranks(output_dir: Path) -> Groups | None:
    """Measure with the other ranks of the job; None on all but rank 0.

    The first rank of each other host tells what is not as it should be there.
    """
    place = read_place()
    device = pick_device(device_kind("auto"), place.local_rank)  # what is wrong is told below
    init_distributed(device, _TIMEOUT_S)
    try:
        measured, speeds = machine.measure_ranks(device)
        own: list[Finding] = []
        if place.rank and place.local_rank == 0:
            found = examine("machine", lambda: machine.machine(output_dir))
            own = [finding for finding in found if finding.level != "ok"]
        every = all_gather_objects(own, None)
    finally:
        dist.destroy_process_group()

    if place.rank:
        return None
    groups = [("ranks", examine("ranks", lambda: machine.judge_ranks(measured, speeds)))]
    for each, findings in zip(measured, every, strict=True):
        groups.append((f"machine {each.host}", findings))
    return groups
