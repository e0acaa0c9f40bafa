"""Compares saving and loading a model's training state with torch.save and with the disk.

    python benchmarks/checkpoint.py [--sizes 3M] [--json FILE] [--directory DIR]

It measures seconds of a save and a load of our checkpoint, of `torch.save` and `torch.load` of the
same state (a file a rank, fsync as well), and of plainly writing and reading as many bytes; and how
long a step waits for a save in a thread.

The script starts its own ranks. The contenders take turns in one run. Each measurement starts at a
barrier and ends with the slowest rank; the tables give medians. Before a load, the operating system
forgets the files. What was loaded is compared with what was saved, bit for bit.

This file measures. The contenders are in `checkpoint_case.py`.
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
from checkpoint_case import Case, build_engine
from model_sizes import SIZES

from mrlhf.device import pick_device
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import init_distributed
from mrlhf.parallel.layout import AxisSizes, ParallelLayout

LAYOUTS = {1: ((1, 1),), 2: ((2, 1), (1, 1))}  # (tp, pp) by world size

DTYPES = ("float32", "bfloat16")
HEADS = (
    "case",
    "MB",
    "save, s",
    "torch.save",
    "disk",
    "load, s",
    "torch.load",
    "disk",
    "wait in a thread's first save, s",
    "later",
    "of the save",
)


def _measure(case: Case, repeats: int) -> dict[str, Any]:
    """One row of the table; the first round touches memory and is not counted."""
    saves: dict[str, list[float]] = {name: [] for name in case.savers()}
    loads: dict[str, list[float]] = {name: [] for name in case.loaders()}
    waits: list[float] = []
    for number in range(repeats + 1):
        for name, save in case.savers().items():
            saves[name].append(_seconds(save))
        waits.append(_seconds(lambda: case.background.save(case.contents)))
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
    }


def _seconds(run: Callable[[], object]) -> float:
    """Seconds from a barrier until the slowest rank has finished."""
    dist.barrier()
    began = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _rank(
    rank: int,
    world_size: int,
    port: int,
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
        case = Case.of(build_engine(size, dtype, groups), root)
        rows.append({"case": name, **_measure(case, arguments.repeats)})

    if rank == 0:
        (directory / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _rows_of_ranks(
    world_size: int, size: str, dtype: str, arguments: argparse.Namespace, root: Path
) -> list[dict[str, Any]]:
    """Start fresh ranks, so that one case's memory is not another's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(
        _rank, (world_size, port, size, dtype, arguments, root), nprocs=world_size
    )
    rows: list[dict[str, Any]] = json.loads((root / "rows.json").read_text())
    return rows


def _line(row: dict[str, Any]) -> str:
    save = {name: statistics.median(values) for name, values in row["save"].items()}
    read = {name: statistics.median(values) for name, values in row["load"].items()}
    later = statistics.median(row["later_waits"])

    cells = [
        row["case"],
        f"{row['bytes'] / 1e6:.0f}",
        *(f"{save[name]:.3f}" for name in ("ours", "torch", "disk")),
        *(f"{read[name]:.3f}" for name in ("ours", "torch", "disk")),
        f"{row['first_wait']:.3f}",
        f"{later:.3f}",
        f"{100 * later / save['ours']:.0f}%",
    ]
    return f"| {' | '.join(cells)} |"


def _measure_all(arguments: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Each row is printed as soon as it is there."""
    print(f"seconds, medians of {arguments.repeats}\n")
    print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|", flush=True)
    rows = []
    for size in arguments.sizes:
        for dtype in arguments.dtypes:
            for world_size in LAYOUTS:
                new = _rows_of_ranks(world_size, size, dtype, arguments, root)
                rows += new
                print(*map(_line, new), sep="\n", flush=True)
    return rows


def main() -> None:
    """Measure, print the tables, and keep every figure if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each contender")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["3M", "110M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: $TMPDIR")
    arguments = parser.parse_args()

    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.directory))
    try:
        rows = _measure_all(arguments, root)
    finally:
        shutil.rmtree(root)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
