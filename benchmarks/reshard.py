"""Compares how long it takes to bring training weights into an inference engine of another layout.

    python benchmarks/reshard.py [--sizes 3M] [--json FILE]

The contenders beside our own resharding:

    full gather    every rank gathers each whole parameter (broadcast over pipeline stages,
                   all-gather over tensor-parallel ranks) and copies its part: what most systems do
    megatron       `megatron.core.resharding` with its plan cached
    flat send      the bytes that had to move, as one flat message for each pair of ranks, over the
                   same backend
    memcpy         each rank copies as many bytes as it had to receive, in its own memory

The script starts its own ranks. All contenders take the same weights and take turns in one run.
Each measurement starts at a barrier and ends with the slowest rank; the table gives medians. The
weights that ours and the full gather deliver are compared, bit for bit. With one GPU there is one
rank, which shares every weight, so nothing has to move.

This file measures. The contenders are in `reshard_contenders.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from model_sizes import SIZES, model_config
from reshard_contenders import Case, Contender, Engine, make_contenders, new_model

from mrlhf.device import Device, pick_device
from mrlhf.models.build import slots_of
from mrlhf.models.families import FAMILIES
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.job import init_distributed
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.execute import ReshardStats
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import sides_around
from mrlhf.weights.shard import Slot

LAYOUTS = ((2, 2), (4, 1), (1, 4), (2, 1))
OTHERS = ("full gather", "megatron", "flat send", "memcpy")


def _spec(size: str) -> ModelSpec:
    return FAMILIES["llama"].read_config(model_config(size).to_dict(), "lm")


def _random_source(
    spec: ModelSpec, groups: RoleGroups, device: Device, dtype: torch.dtype
) -> tuple[Any, list[Slot]]:
    built = new_model(spec, groups, device, dtype)
    slots = slots_of(built.chunks, spec, groups.layout, groups.coordinates)

    where = device.torch_device
    for slot in slots:
        piece = slot.piece
        seed = sum(map(ord, piece.name)) * 1009 + piece.start  # equal on all ranks that hold it
        generator = torch.Generator(device=where).manual_seed(seed)
        view = slot.view(piece.start, piece.stop)
        view.copy_(torch.randn(view.shape, generator=generator, dtype=dtype, device=where))
    return built.chunks[0], slots


def _make_case(
    factory: GroupFactory, device: Device, size: str, layout: ParallelLayout, tp: int
) -> Case:
    """Build the training model with random weights, and plan how they get into the engine."""
    spec = _spec(size)
    rank = dist.get_rank()
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    groups = factory.role_groups(layout)
    engines = EngineLayout.inside(layout, tp)

    module, source = _random_source(spec, groups, device, dtype)
    sides = sides_around(
        rank,
        engines,
        lambda rank: role_pieces(spec, layout, rank),
        lambda rank: engine_pieces(spec, engines, rank),
    )
    planner = Planner(sides, dtype.itemsize)
    return Case(spec, device, dtype, rank, groups, engines, module, source, planner)


def _measure_case(
    factory: GroupFactory, device: Device, size: str, layout: ParallelLayout, tp: int, repeats: int
) -> dict[str, Any]:
    """Measure one row of the table."""
    case = _make_case(factory, device, size, layout, tp)
    contenders = make_contenders(case, factory)

    for contender in contenders.values():  # makes plans and connections, and touches memory
        contender.run()
    first, *others = [c.engine for c in contenders.values() if c.engine is not None]
    assert all(_same(first, other) for other in others), "the contenders' weights differ"

    seconds = _measure(contenders, device, repeats)
    stats: ReshardStats = contenders["ours"].run()
    copied = case.planner.plan(case.rank).bytes_copied
    rows = _of_all_ranks(stats.bytes_moved, stats.bytes_had_to_move, copied, stats.peak_extra_bytes)
    moved, minimum, copied, _ = rows.sum(dim=0).tolist()
    return {
        "case": f"{size} TP{layout.tp} PP{layout.pp} DP{layout.dp} → TP{tp}",
        "bytes_moved": moved,
        "lower_bound": minimum,
        "bytes_copied_locally": copied,
        "peak_extra_bytes": int(rows[:, 3].max()),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "all_seconds": seconds,
    }


def _measure(
    contenders: dict[str, Contender], device: Device, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each run of each contender, who take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            seconds[name].append(_seconds(contender.run, device))
    return seconds


def _seconds(run: Callable[[], Any], device: Device) -> float:
    """Seconds from a barrier until the slowest rank has finished."""
    device.synchronize()
    dist.barrier()

    began = time.perf_counter()
    run()
    device.synchronize()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)

    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _of_all_ranks(*numbers: int) -> torch.Tensor:
    """The numbers of every rank, int64 [ranks, numbers]."""
    own = torch.tensor(numbers, dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered)


def _same(one: Engine, other: Engine) -> bool:
    pairs = zip(one.weight_slots(), other.weight_slots(), strict=True)
    same = torch.tensor(
        [all(torch.equal(a.parameter, b.parameter) for a, b in pairs)], dtype=torch.int64
    )
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def _rank(rank: int, world_size: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    device = pick_device("auto", rank)
    init_distributed(device, 600.0)

    factory = GroupFactory(timeout_s=600.0)
    rows = []
    for size in arguments.sizes:
        fitting = [(tp, pp) for tp, pp in LAYOUTS if tp * pp <= world_size]
        for tp, pp in fitting or [(1, 1)]:
            layout = ParallelLayout.for_world("actor", world_size, AxisSizes(tp=tp, pp=pp))
            for engine_tp in (1, 2, 4):
                if tp * pp % engine_tp != 0:
                    continue
                row = _measure_case(factory, device, size, layout, engine_tp, arguments.repeats)
                rows.append(row)
                if rank == 0:
                    print(_line(row), flush=True)

    if rank == 0 and arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


def _line(row: dict[str, Any]) -> str:
    """A row of the table: milliseconds, and in brackets the ratio to the milliseconds of ours."""
    seconds = row["seconds"]
    cells = [row["case"], f"{row['bytes_moved'] / 1e6:.2f}", f"{row['lower_bound'] / 1e6:.2f}"]
    cells.append(f"{row['bytes_copied_locally'] / 1e6:.2f}")
    cells.append(f"{seconds['ours'] * 1e3:.1f}")
    for name in OTHERS:
        cells.append(f"{seconds[name] * 1e3:.1f} ({seconds[name] / seconds['ours']:.2f})")
    cells.append(f"{row['peak_extra_bytes'] / 2**20:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Start the ranks; the first prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each contender")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["3M", "110M"])
    arguments = parser.parse_args()

    gpus = torch.cuda.device_count()
    world_size = 4 if gpus == 0 else 1 << min(2, gpus.bit_length() - 1)  # 1, 2 or 4
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    machine = "CPU, float32"
    if gpus > 0:
        machine = f"{torch.cuda.get_device_name()}, bfloat16"
    medians = f"milliseconds, medians of {arguments.repeats}; in brackets: times ours"
    print(f"{world_size} ranks on {machine}; {medians}\n")
    heads = [
        "case",
        "moved, MB",
        "lower bound, MB",
        "copied locally, MB",
        "ours",
        *OTHERS,
        "peak extra, MiB",
    ]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    torch.multiprocessing.spawn(_rank, (world_size, port, arguments), nprocs=world_size)


if __name__ == "__main__":
    main()
