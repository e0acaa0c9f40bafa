"""Compares how long it takes to bring training weights into an inference engine of another layout.

    python benchmarks/reshard.py [--sizes 3M] [--json FILE]

The contenders beside our own resharding:

    full gather    every rank gathers each whole parameter (broadcast over pipeline stages,
                   all-gather over tensor-parallel ranks) and copies its part: what most systems do
    megatron       `megatron.core.resharding` with its plan cached
    flat send      the bytes that had to move, as one flat message for each pair of ranks, over the
                   same backend
    memcpy         each rank copies as many bytes as it had to receive, in its own memory
    ours, sent     our executor without shared memory; on a GPU it never has any

The script starts its own ranks. All contenders take the same weights and take turns in one run.
Each measurement starts at a barrier and ends with the slowest rank; the table gives medians. The
weights that ours and the full gather deliver are compared, bit for bit. With one GPU there is one
rank, which shares every weight, so nothing has to move.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from transformers import LlamaConfig

from mrlhf.device import Device, init_distributed, pick_device
from mrlhf.inference.native.parameters import Parameters
from mrlhf.models.build import build_model, slots_of
from mrlhf.models.families import FAMILIES
from mrlhf.models.parameters import engine_pieces, parameter_names, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import connect, exchange
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import EngineLayout, ParallelLayout
from mrlhf.reshard.execute import Resharder, ReshardStats
from mrlhf.reshard.plan import Move, ReshardPlan, plan
from mrlhf.reshard.views import Views
from mrlhf.weights.shard import Piece, Slot

SIZES: dict[str, dict[str, int]] = {
    "3M": {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    },
    "110M": {
        "vocab_size": 22528,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}
LAYOUTS = ((2, 2), (4, 1), (1, 4), (2, 1))
OTHERS = ("full gather", "megatron", "flat send", "memcpy", "ours, sent")
BUCKET_BYTES = 64 << 20
Contenders = dict[str, Callable[[], Any]]


class Engine:
    """The native engine's weights, which a reshard fills."""

    def __init__(
        self, spec: ModelSpec, tp_rank: int, tp_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._parameters = Parameters(spec, tp_rank, tp_size, device, dtype)
        self.bind = self._parameters.bind
        self.weight_slots = self._parameters.slots

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces of each parameter."""
        return self._parameters.pieces


class FullGather:
    """Gathers one whole parameter at a time on every rank and copies what the engine needs."""

    def __init__(
        self, spec: ModelSpec, groups: RoleGroups, source: list[Slot], target: list[Slot], rank: int
    ) -> None:
        self._groups = groups
        self._stored = {slot.piece.parameter: slot.parameter.detach() for slot in source}
        self._target = {slot.piece.key: slot for slot in target}

        self._steps: list[tuple[int, str, list[Piece]]] = []
        for stage in range(groups.layout.pp):
            self._steps += _steps_of_stage(spec, groups, stage)

        needed = [slot.piece for slot in target]
        self._copies = [_copies(needed, pieces, rank) for _, _, pieces in self._steps]
        self._shapes = self._gather_shapes()

    def _gather_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each step's parameter, which only the ranks of its stage know."""
        own: list[Any] = []
        for owner, name, _ in self._steps:
            own.append(tuple(self._stored[name].shape) if owner == dist.get_rank() else None)

        of_stages: list[Any] = [None] * dist.get_world_size(self._groups.pp)
        dist.all_gather_object(of_stages, own, group=self._groups.pp)

        shapes = []
        for candidates in zip(*of_stages, strict=True):
            (shape,) = (shape for shape in candidates if shape is not None)
            shapes.append(shape)
        return shapes

    @torch.no_grad()
    def run(self) -> None:
        """Gather and copy everything once."""
        like = next(iter(self._stored.values()))
        tp = self._groups.layout.tp
        pp = self._groups.layout.pp

        for (owner, name, pieces), shape, copies in zip(
            self._steps, self._shapes, self._copies, strict=True
        ):
            shard = self._stored[name] if owner == dist.get_rank() else like.new_empty(shape)
            if pp > 1:
                dist.broadcast(shard, owner, group=self._groups.pp)

            shards = [shard]
            if tp > 1:
                shards = [torch.empty_like(shard) for _ in range(tp)]
                dist.all_gather(shards, shard, group=self._groups.tp)

            views = Views([Slot(piece, shards[int(piece.parameter)]) for piece in pieces], {})
            for copy in copies:
                view = self._target[copy.target.key].view(copy.start, copy.stop)
                view.copy_(views(copy.source, copy.start, copy.stop).reshape(view.shape))


def _steps_of_stage(
    spec: ModelSpec, groups: RoleGroups, stage: int
) -> list[tuple[int, str, list[Piece]]]:
    """For each parameter of a stage: the rank that broadcasts it, its name, and its pieces.

    `Piece.parameter` is the tensor-parallel rank whose shard holds the piece.
    """
    layout = groups.layout
    coordinates = groups.coordinates
    pieces: dict[str, dict[Any, Piece]] = {}
    for tp in range(layout.tp):
        for piece in role_pieces(spec, layout, layout.rank_at(tp, coordinates.dp, stage)):
            pieces.setdefault(piece.parameter, {})[piece.key] = replace(piece, parameter=str(tp))

    names = parameter_names(spec, layout, stage)
    if spec.output_is_embedding and layout.pp > 1:  # the last stage's copy of the embedding
        names = [name for name in names if name != "output_layer.weight"]

    owner = layout.rank_at(coordinates.tp, coordinates.dp, stage)
    return [(owner, name, list(pieces[name].values())) for name in names]


def _copies(needed: list[Piece], held: list[Piece], rank: int) -> list[Move]:
    """What to copy from the gathered pieces.

    The plan would share some of them, but they are thrown away, so those are copied too.
    """
    by_key = {piece.key: piece for piece in held}
    names = {piece.name for piece in held}
    wanted = [piece for piece in needed if piece.name in names]
    local_plan = plan({rank: held}, {rank: wanted}, itemsize=1)

    copies = list(local_plan.copies)
    for alias in local_plan.aliases:
        for piece in alias.pieces:
            source = by_key[piece.key]
            copies.append(Move(rank, rank, source, piece, piece.start, piece.stop))
    return copies


@dataclass
class Flat:
    """As many bytes as had to move, in flat buffers."""

    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]

    @classmethod
    def of(cls, whole_plan: ReshardPlan, rank: int, device: torch.device) -> Flat:
        """Buffers for this rank's part of the plan."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for move in whole_plan.moves:
            size = move.elements * whole_plan.itemsize
            if move.source_rank == rank:
                sent[move.target_rank] += size
            if move.target_rank == rank:
                received[move.source_rank] += size

        ones = partial(torch.ones, dtype=torch.uint8, device=device)
        return cls(
            [(peer, ones(size)) for peer, size in sent.items()],
            [(peer, ones(size)) for peer, size in received.items()],
        )

    def send(self) -> None:
        """All messages at once."""
        exchange(self.sends, self.receives)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def _spec(size: str) -> ModelSpec:
    config = LlamaConfig(
        **SIZES[size],
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return FAMILIES["llama"].read_config(config.to_dict(), "lm")


def _random_source(
    spec: ModelSpec, groups: RoleGroups, device: Device, dtype: torch.dtype
) -> tuple[Any, list[Slot]]:
    built = build_model(
        spec, groups, dtype=dtype, device=device, sequence_parallel=False, recompute="none"
    )
    slots = slots_of(built.module, spec, groups.layout, groups.coordinates)

    where = device.torch_device
    for slot in slots:
        piece = slot.piece
        seed = sum(map(ord, piece.name)) * 1009 + piece.start  # equal on all ranks that hold it
        generator = torch.Generator(device=where).manual_seed(seed)
        view = slot.view(piece.start, piece.stop)
        view.copy_(torch.randn(view.shape, generator=generator, dtype=dtype, device=where))
    return built.module, slots


def _megatron(
    module: Any, spec: ModelSpec, groups: RoleGroups, device: Device, dtype: torch.dtype
) -> Callable[[], None]:
    """Megatron-core's resharding, into another model in the engine's layout."""
    from megatron.core.resharding.refit import swap_model_weights
    from megatron.core.utils import unwrap_model

    built = build_model(
        spec, groups, dtype=dtype, device=device, sequence_parallel=False, recompute="none"
    )
    backend = "nccl" if device.kind == "cuda" else "gloo"
    return lambda: swap_model_weights(unwrap_model(module), unwrap_model(built.module), backend)


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


def _total(stats: ReshardStats) -> tuple[int, int, int]:
    """Over all ranks: the bytes moved, the bytes that had to move, and the largest extra memory."""
    sums = torch.tensor(
        [stats.bytes_moved, stats.bytes_had_to_move, stats.peak_extra_bytes], dtype=torch.int64
    )
    gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sums)
    rows = torch.stack(gathered)
    return int(rows[:, 0].sum()), int(rows[:, 1].sum()), int(rows[:, 2].max())


def _same(one: Engine, other: Engine) -> bool:
    pairs = zip(one.weight_slots(), other.weight_slots(), strict=True)
    same = torch.tensor(
        [all(torch.equal(a.parameter, b.parameter) for a, b in pairs)], dtype=torch.int64
    )
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def _case(
    factory: GroupFactory, device: Device, size: str, layout: ParallelLayout, tp: int, repeats: int
) -> dict[str, Any]:
    """Measure one row of the table."""
    spec = _spec(size)
    rank = dist.get_rank()
    where = device.torch_device
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    groups = factory.role_groups(layout)
    engines = EngineLayout.inside(layout, tp)

    module, source = _random_source(spec, groups, device, dtype)
    (ranks,) = (ranks for ranks in layout.groups("tp", "pp") if rank in ranks)
    whole_plan = plan(
        {r: role_pieces(spec, layout, r) for r in ranks},
        {r: engine_pieces(spec, engines, r) for r in ranks},
        dtype.itemsize,
    )

    shared_engine, sent_engine, gathered_engine = (
        Engine(spec, engines.place(rank)[1], tp, where, dtype) for _ in range(3)
    )
    resharder = partial(
        Resharder,
        whole_plan,
        source,
        rank=rank,
        bucket_bytes=BUCKET_BYTES,
        verify=False,
        group=groups.mp,
    )
    ours = resharder(engine=shared_engine, shared_memory=True)
    sent = resharder(engine=sent_engine, shared_memory=False)

    flat = Flat.of(whole_plan, rank, where)
    connect(None, where)
    pairs = [(buffer, torch.ones_like(buffer)) for _, buffer in flat.receives]
    engine_side = factory.role_groups(ParallelLayout(tp=tp, pp=1, dp=dist.get_world_size() // tp))
    contenders: Contenders = {
        "ours": ours.run,
        "full gather": FullGather(spec, groups, source, gathered_engine.weight_slots(), rank).run,
        "megatron": _megatron(module, spec, engine_side, device, dtype),
        "flat send": flat.send,
        "memcpy": partial(_copy_all, pairs),
        "ours, sent": sent.run,
    }

    for run in contenders.values():  # makes plans and connections, and touches memory
        run()
    assert _same(shared_engine, gathered_engine) and _same(shared_engine, sent_engine), (
        "the contenders' weights differ"
    )

    seconds = _measure(contenders, device, repeats)
    moved, minimum, peak = _total(ours.run())
    return {
        "case": f"{size} TP{layout.tp} PP{layout.pp} DP{layout.dp} → TP{tp}",
        "bytes_moved": moved,
        "lower_bound": minimum,
        "bytes_copied_locally": whole_plan.bytes_local * layout.dp,
        "peak_extra_bytes": peak,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "all_seconds": seconds,
    }


def _measure(contenders: Contenders, device: Device, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each contender, who take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            seconds[name].append(_seconds(run, device))
    return seconds


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
        for tp, pp in LAYOUTS if world_size > 1 else ((1, 1),):
            layout = ParallelLayout.for_world("actor", world_size, tp, pp)
            for engine_tp in (1, 2, 4):
                if tp * pp % engine_tp != 0:
                    continue
                rows.append(_case(factory, device, size, layout, engine_tp, arguments.repeats))
                if rank == 0:
                    print(_line(rows[-1]), flush=True)

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
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
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
