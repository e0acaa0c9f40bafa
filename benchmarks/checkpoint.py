"""Compares saving and loading a model's training state with torch.save and with the disk.

    python benchmarks/checkpoint.py [--sizes 3M] [--json FILE] [--directory DIR]

Three parts, which `--parts` chooses:

    files    seconds of a save and a load of our checkpoint, of `torch.save` and `torch.load` of the
             same state (a file a rank, fsync as well), and of plainly writing and reading as many
             bytes; and how long a step waits for a save in a thread
    memory   by how much a rank grows, at its largest, in a save and a load
    signal   a run by torchrun that gets SIGUSR1 while it updates the policy: seconds until the
             manifest is there, and until the job has ended

The script starts its own ranks. The contenders take turns in one run. Each measurement starts at a
barrier and ends with the slowest rank; the tables give medians. Before a load, the operating system
forgets the files. What was loaded is compared with what was saved, bit for bit.

This file measures. The contenders are in `checkpoint_case.py`, the interrupted run in
`checkpoint_signal.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from checkpoint_case import Case, build_engine, load, make_saver, peak_growth
from checkpoint_signal import interrupt_run
from model_sizes import SIZES

from mrlhf.device import pick_device
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import init_distributed
from mrlhf.parallel.layout import AxisSizes, ParallelLayout

LAYOUTS = {1: ((1, 1),), 2: ((2, 1), (1, 1))}
"""(tp, pp) by world size."""

DTYPES = ("float32", "bfloat16")
PARTS = ("files", "memory", "signal")
FILES_HEAD = (
    "case",
    "MB",
    "save, s",
    "torch.save",
    "disk",
    "of disk speed",
    "load, s",
    "torch.load",
    "disk",
    "wait in a thread's first save, s",
    "later",
    "of the save",
    "copied after, s",
)
MEMORY_HEAD = ("case", "own state, MB", "save", "load", "first save in a thread", "next")
SIGNAL_HEAD = ("case", "MB", "manifest after, s", "end of the job after, s", "exit code")


def _measure_files(case: Case, repeats: int) -> dict[str, Any]:
    """One row of the table of files; the first round touches memory and is not counted."""
    saves: dict[str, list[float]] = {name: [] for name in case.savers()}
    loads: dict[str, list[float]] = {name: [] for name in case.loaders()}
    waits: list[float] = []
    copied: list[float] = []
    for number in range(repeats + 1):
        for name, save in case.savers().items():
            saves[name].append(_seconds(save))
        waits.append(_seconds(lambda: case.background.save(case.contents)))
        copied.append(waits[-1] + _seconds(case.wait_until_copied))
        case.background.finish(wait=True)

        nbytes = case.bytes_written()
        case.forget_files()
        for name, read in case.loaders().items():
            loads[name].append(_seconds(read))
        if number == 0:
            case.assert_equal()
        case.delete_files()

    first, *later = waits
    return {
        "bytes": nbytes,
        "save": {name: values[1:] for name, values in saves.items()},
        "load": {name: values[1:] for name, values in loads.items()},
        "first_wait": first,
        "later_waits": later,
        "copied": copied[1:],
    }


def _measure_memory(size: str, dtype: str, groups: Any, root: Path) -> dict[str, Any]:
    """One row of the table of memory; the largest of all ranks."""
    engine = build_engine(size, dtype, groups)
    case = Case.of(engine, root)
    case.copies.clear()
    grown: dict[str, int] = {}

    with peak_growth(grown, "save"):
        case.saver.save(case.contents)
    case.forget_files()
    with peak_growth(grown, "load"):
        load(engine, root / "ours")
    background = make_saver(root / "background", asynchronous=True)
    for name in ("first save in a thread", "next"):
        with peak_growth(grown, name):
            background.save(case.contents)
            background.finish(wait=True)
    case.delete_files()

    return {"state": _largest(case.nbytes), **{n: _largest(b) for n, b in grown.items()}}


def _seconds(run: Callable[[], object]) -> float:
    """Seconds from a barrier until the slowest rank has finished."""
    dist.barrier()
    began = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _largest(number: int) -> int:
    largest = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _rank(
    rank: int,
    world_size: int,
    port: int,
    part: str,
    size: str,
    dtype: str,
    arguments: argparse.Namespace,
    directory: Path,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    init_distributed(pick_device("cpu", rank), 600.0)

    factory = GroupFactory(timeout_s=600.0)
    rows = []
    for tp, pp in LAYOUTS[world_size]:
        layout = ParallelLayout.for_world("actor", world_size, AxisSizes(tp=tp, pp=pp))
        name = f"{size} {dtype} TP{layout.tp} DP{layout.dp}"
        root = directory / name.replace(" ", "-")
        root.mkdir(exist_ok=True)
        groups = factory.role_groups(layout)
        if part == "files":
            case = Case.of(build_engine(size, dtype, groups), root)
            row = _measure_files(case, arguments.repeats)
        else:
            row = _measure_memory(size, dtype, groups, root)
        rows.append({"case": name, **row})

    if rank == 0:
        (directory / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _rows_of_ranks(
    world_size: int, part: str, size: str, dtype: str, arguments: argparse.Namespace, root: Path
) -> list[dict[str, Any]]:
    """Start fresh ranks, so that one case's memory is not another's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(
        _rank, (world_size, port, part, size, dtype, arguments, root), nprocs=world_size
    )
    rows: list[dict[str, Any]] = json.loads((root / "rows.json").read_text())
    return rows


def _files_line(row: dict[str, Any]) -> list[str]:
    save = {name: statistics.median(values) for name, values in row["save"].items()}
    read = {name: statistics.median(values) for name, values in row["load"].items()}
    later = statistics.median(row["later_waits"])

    speed = row["save"]
    ratios = [disk / ours for disk, ours in zip(speed["disk"], speed["ours"], strict=True)]

    return [
        row["case"],
        f"{row['bytes'] / 1e6:.0f}",
        *(f"{save[name]:.3f}" for name in ("ours", "torch", "disk")),
        f"{statistics.median(ratios):.2f}",
        *(f"{read[name]:.3f}" for name in ("ours", "torch", "disk")),
        f"{row['first_wait']:.3f}",
        f"{later:.3f}",
        f"{100 * later / save['ours']:.0f}%",
        f"{statistics.median(row['copied']):.3f}",
    ]


def _memory_line(row: dict[str, Any]) -> list[str]:
    return [row["case"], *(f"{row[name] / 1e6:.0f}" for name in row if name != "case")]


def _signal_line(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        f"{row['bytes'] / 1e6:.0f}",
        f"{row['manifest_s']:.1f}",
        f"{row['end_s']:.1f}",
        str(row["exit_code"]),
    ]


def _print_line(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _print_head(title: str, heads: tuple[str, ...]) -> None:
    print(f"\n{title}\n")
    _print_line(list(heads))
    print("|---" * len(heads) + "|", flush=True)


def _measure(arguments: argparse.Namespace, root: Path) -> dict[str, list[dict[str, Any]]]:
    """All parts; prints each row as soon as it is there."""
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in arguments.parts}
    tables = (
        ("files", f"seconds, medians of {arguments.repeats}", FILES_HEAD, _files_line),
        ("memory", "growth at its largest, MB", MEMORY_HEAD, _memory_line),
    )
    for part, title, heads, line in tables:
        if part not in arguments.parts:
            continue
        _print_head(f"{part}: {title}", heads)
        for size in arguments.sizes:
            for dtype in arguments.dtypes:
                for world_size in LAYOUTS:
                    new = _rows_of_ranks(world_size, part, size, dtype, arguments, root)
                    rows[part] += new
                    for row in new:
                        _print_line(line(row))

    if "signal" in arguments.parts:
        _print_head("signal: 2 ranks, SIGUSR1 in the update of the policy", SIGNAL_HEAD)
        for size in arguments.sizes:
            row = {"case": size, **interrupt_run(size, root / f"signal-{size}")}
            rows["signal"].append(row)
            _print_line(_signal_line(row))
    return rows


def main() -> None:
    """Measure, print the tables, and keep every figure if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each contender")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["3M", "110M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: $TMPDIR")
    arguments = parser.parse_args()

    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.directory))
    try:
        rows = _measure(arguments, root)
    finally:
        shutil.rmtree(root)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
