"""Tables that the ranks of a machine share, on four ranks: as one machine, as two, and as four that
are one but cannot share.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import threading
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import MethodError, UserTraceback
from mrlhf.inference.base import EngineStats, MaskWords, Sample
from mrlhf.models.spec import Experts
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.parallel.machine import Machine
from mrlhf.rollout.drawn_sample import DrawnSample, TokenRun
from mrlhf.rollout.exchange import DrawnSamples, exchange_samples
from tests.ranks import run_ranks

WORLD_SIZE = 4
DTYPES = (torch.float32, torch.int32, torch.bool, torch.uint8, torch.int16)
SHAPE = (7, 5)
BATCH = 12
CHOSEN = [9, 2, 0, 7]  # rows that are selected
# Two mixtures; numbers up to 299 take two bytes.
EXPERTS = Experts(
    count=300,
    per_token=3,
    ffn_size=1,
    layers=(True, False, True),
    normalised=True,
)


@dataclass(frozen=True)
class _Tree:
    name: str
    first: Tensor
    same: Tensor
    parts: dict[str, Any]
    whole: object


def _random(dtype: torch.dtype, seed: int) -> Tensor:
    numbers = torch.randint(0, 200, SHAPE, generator=torch.Generator().manual_seed(seed))
    return (numbers / 7).to(dtype) if dtype.is_floating_point else (numbers % 100).to(dtype)


def _owner(seed: int) -> Tensor:
    """The rank that writes each entry; 4 is nobody."""
    return torch.randint(0, WORLD_SIZE + 1, SHAPE, generator=torch.Generator().manual_seed(seed))


def _tables(rank: int, machine: Machine) -> list[tuple[bool, bool]]:
    """For each of some tables: whether it is what an all-reduce gives, and whether it is shared."""
    found = []
    for seed in range(12):
        dtype = DTYPES[seed % len(DTYPES)]
        mine = _owner(seed) == rank
        table = machine.table(SHAPE, dtype)
        table.entries[mine] = _random(dtype, seed)[mine]

        plain = torch.where(mine, _random(dtype, seed), torch.zeros((), dtype=dtype)).double()
        dist.all_reduce(plain)
        found.append((torch.equal(table.complete(), plain.to(dtype)), table.is_shared))
    assert machine.table((0, 3), torch.float32).complete().shape == (0, 3)
    return found


def _sharers(machine: Machine) -> int:
    """How many ranks see one table: each adds 1 to what it sees, one after the other."""
    table = machine.table((1,), torch.int32).complete()
    for rank in range(WORLD_SIZE):
        if dist.get_rank() == rank:
            table += 1
        dist.barrier()
    return int(table[0])


def _mapped_files() -> list[str]:
    """The files of shared tables that this process has in its memory, as Linux names them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "memfd:mrlhf" in line]


def _memory_is_freed(machine: Machine) -> tuple[list[str], list[str]]:
    """The files behind a table while a part of it is in use, and afterwards."""
    gc.collect()
    part = machine.table((1 << 16,), torch.int32).complete()[7:9]
    before = _mapped_files()
    del part
    return before, _mapped_files()


def _computed_once(rank: int, machine: Machine) -> dict[str, Any]:
    calls = []
    whole = object()
    large = torch.arange(6.0).view(2, 3)

    def compute() -> _Tree:
        calls.append(rank)
        strided = torch.arange(12).view(3, 4).t()
        parts = {"strided": strided, "known": large, "none": None, "scalar": torch.tensor(2.5)}
        return _Tree("a name", large + 1, parts["strided"], parts, whole)

    tree = machine.compute_on_leader(compute, shared=(whole, None, large))
    assert tree.whole is whole and tree.parts["known"] is large
    assert torch.equal(tree.first, large + 1) and tree.first.dtype == torch.float32
    assert torch.equal(tree.same, torch.arange(12).view(3, 4).t())
    assert tree.parts["strided"] is tree.same and tree.parts["none"] is None
    assert tree.parts["scalar"] == 2.5 and tree.name == "a name"
    assert machine.compute_on_leader(lambda: {"plain": 3}) == {"plain": 3}
    torch.save([tree.first, tree.same], io.BytesIO())  # it refuses views of one storage
    failures = [_failure(machine, kind) for kind in ("named", "derived", "bug")]
    return {"calls": calls, "failures": failures}


def _failure(machine: Machine, kind: str) -> tuple[str, str, str]:
    """The class, the message and the cause of the error that `compute_on_leader` raises."""

    class Derived(MethodError):
        """It can be neither pickled nor made from its arguments."""

        def __init__(self, text: str, number: int) -> None:
            super().__init__(text, number, threading.Lock())

        def __str__(self) -> str:
            return str(self.args[0])

    def compute() -> None:
        if kind == "bug":
            raise KeyError("a bug")
        if kind == "derived":
            raise Derived("the estimator failed", 3)
        raise MethodError("the estimator failed") from UserTraceback("line 1 of the user's file")

    try:
        machine.compute_on_leader(compute)
    except Exception as error:
        return type(error).__name__, str(error), str(error.__cause__)
    raise AssertionError("nothing was raised")


def _recorded(row: int) -> np.ndarray:
    """Experts of 1 to 6 tokens."""
    numbers = np.arange((1 + 5 * row % 6) * 2 * 3) * 7 + row
    return (numbers % EXPERTS.count).astype(np.int16).reshape(-1, 2, 3)


def _samples(replica: int, with_experts: bool) -> tuple[list[int], list[Sample]]:
    """Every fourth row of a batch, the last one first; the responses have 0 to 4 tokens."""
    rows = list(range(replica, BATCH, WORLD_SIZE))[::-1]
    samples = []
    for row in rows:
        tokens = [row * 10 + place for place in range(row % 5)]
        logprobs = [-token / 8 for token in tokens]
        experts = _recorded(row) if with_experts else None
        samples.append(Sample(0, 0, tokens, logprobs, row % 2 == 0, row, experts))
    return rows, samples


def _masks(row: int, places: int) -> MaskWords:
    """Up to two words of each place, which say where they belong."""
    counts = [(row + place) % 3 for place in range(places)]
    words = [100 * row + 10 * place + w for place in range(places) for w in range(counts[place])]
    return MaskWords(array("i", words), array("i", counts))


def _exchanged(factory: GroupFactory, tp: int) -> dict[str, Any]:
    """The samples of all replicas at once, and in two parts with a checkpoint between."""
    actor = ParallelLayout(tp=1, pp=1, dp=WORLD_SIZE)
    layout = EngineLayout.consecutive(actor, tp)
    groups = factory.engine_groups(layout)
    rows: list[int] = []
    samples: list[Sample] = []
    for part in range(groups.replica, WORLD_SIZE, WORLD_SIZE // tp):
        some_rows, some_samples = _samples(part, with_experts=groups.tp_rank == 0)
        rows += some_rows
        samples += some_samples

    def whole_of(row: int, sample: Sample) -> DrawnSample:
        tokens, logprobs = sample.arrays
        runs = [TokenRun(len(tokens), sample.version)]
        recorded = len(_recorded(row))
        masks = _masks(row, len(tokens))
        arguments = (runs, True, sample.stopped, recorded, sample.experts)
        return DrawnSample(row, tokens, logprobs, *arguments, masks=masks)

    def begun(one: DrawnSample) -> DrawnSample:
        """Its first two tokens."""
        length = min(2, len(one.token_ids))
        runs = [TokenRun(length, one.runs[0].version)]
        masks = _masks(one.row, length)
        return DrawnSample(
            one.row, one.token_ids[:length], one.logprobs[:length], runs, masks=masks
        )

    every = list(map(whole_of, rows, samples))

    def exchanged(
        some: slice, stats: EngineStats, earlier: DrawnSamples | None = None, half: slice = slice(0)
    ) -> DrawnSamples:
        mine = every[some] + [begun(one) for one in every[half]]
        return exchange_samples(groups, BATCH, mine, stats, earlier, EXPERTS)

    stats = EngineStats(steps=1 + groups.replica)
    whole = exchanged(slice(None), stats)
    first = exchanged(slice(1), stats, half=slice(2, None))
    still_open = first.open_at(range(BATCH))
    chosen = whole.select(CHOSEN)
    stored = DrawnSamples.from_state(first.state_dict())
    both = exchanged(slice(1, None), EngineStats(), stored)
    nothing = exchanged(slice(0), EngineStats())
    restored = DrawnSamples.from_state(nothing.state_dict())
    assert len(restored.headers.rows) == len(nothing.headers.rows) == 0

    return {
        "rows": sorted(whole.headers.rows.tolist()),
        "tokens": whole.token_ids.tolist(),
        "logprobs": whole.logprobs.tolist(),
        "experts": whole.experts.tolist(),
        "in parts": torch.equal(both.token_ids, whole.token_ids)
        and torch.equal(both.experts, whole.experts)
        and torch.equal(both.masks, whole.masks)
        and torch.equal(both.mask_counts, whole.mask_counts)
        and torch.equal(both.logprobs, whole.logprobs)
        and both.stats == whole.stats,
        "headers": sorted(zip(*(column.tolist() for column in both.headers), strict=True)),
        "versions": both.runs.of_tokens().tolist(),
        "steps": [one.steps for one in whole.stats],
        "open": {
            row: (list(one.token_ids), list(one.logprobs), one.runs, one.masks)
            for row, one in still_open.items()
        },
        "chosen": {
            "tokens": chosen.token_ids.tolist(),
            "logprobs": chosen.logprobs.tolist(),
            "experts": chosen.experts.tolist(),
            "masks": chosen.masks.tolist(),
            "mask counts": chosen.mask_counts.tolist(),
            "headers": list(zip(*(column.tolist() for column in chosen.headers), strict=True)),
            "versions": chosen.runs.of_tokens().tolist(),
        },
    }


def _in_ranks(rank: int, world_size: int) -> dict[str, Any]:
    ranks = range(world_size)
    factories = {
        "one machine": GroupFactory(60.0),
        "two machines": GroupFactory(60.0, [f"machine {r % 2}" for r in ranks]),
        "four machines": GroupFactory(60.0, [f"machine {r}" for r in ranks]),
        "not shared": GroupFactory(60.0),
        "one rank does not share": GroupFactory(60.0),
        "one of two not shared": GroupFactory(60.0, [f"machine {r // 2}" for r in ranks]),
    }

    results: dict[str, Any] = {}
    warnings: list[str] = []
    logger = logging.getLogger("mrlhf.parallel.machine")
    logger.addFilter(lambda record: warnings.append(record.getMessage()) is not None)

    for name, factory in factories.items():
        if name == "not shared":
            os.memfd_create = _refuse  # type: ignore[assignment]
        elif name == "one rank does not share" and rank == 3:
            os.readlink = _refuse  # type: ignore[assignment]
        elif name == "one of two not shared" and rank >= 2:
            os.memfd_create = _make_a_strangers_file  # type: ignore[assignment]
        machine = factory.machine
        warnings.clear()
        results[name] = {
            "tables": _tables(rank, machine),
            "sharers": _sharers(machine),
            "leader": machine.is_leader,
            "once": _computed_once(rank, machine),
            "exchanged": [_exchanged(factory, tp) for tp in (1, 2)],
            "warnings": list(warnings),
        }
        os.memfd_create = _memfd_create
        os.readlink = _readlink

    results["freed"] = _memory_is_freed(factories["one machine"].machine)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(WORLD_SIZE, _in_ranks)


# How many ranks share a table with each rank, and which ranks lead their machine.
MACHINES = {
    "one machine": ([4, 4, 4, 4], [0]),
    "two machines": ([2, 2, 2, 2], [0, 1]),
    "four machines": ([1, 1, 1, 1], [0, 1, 2, 3]),
    "not shared": ([1, 1, 1, 1], [0]),
    "one rank does not share": ([1, 1, 1, 1], [0]),
    "one of two not shared": ([2, 2, 1, 1], [0, 2]),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_table_is_what_an_all_reduce_gives(ranks: list[dict[str, Any]], name: str) -> None:
    sharers, leaders = MACHINES[name]
    assert [rank[name]["sharers"] for rank in ranks] == sharers
    assert [number for number in range(WORLD_SIZE) if ranks[number][name]["leader"]] == leaders
    for number, rank in enumerate(ranks):
        assert rank[name]["tables"] == [(True, sharers[number] > 1)] * 12


def test_the_leader_of_a_machine_that_cannot_share_says_why(ranks: list[dict[str, Any]]) -> None:
    why = {
        ("not shared", 0): "no memory of this kind",
        ("one rank does not share", 0): "no memory of this kind",
        ("one of two not shared", 2): "is another file: /memfd:a stranger's (deleted)",
    }
    for number, rank in enumerate(ranks):
        for name in MACHINES:
            warnings = rank[name]["warnings"]
            assert len(warnings) == int((name, number) in why), (name, number)
            assert all(f"{why[name, number]})" in warning for warning in warnings)


@pytest.mark.parametrize("name", MACHINES)
def test_a_result_is_computed_once_a_machine(ranks: list[dict[str, Any]], name: str) -> None:
    leaders = MACHINES[name][1]
    for number, rank in enumerate(ranks):
        once = rank[name]["once"]
        assert once["calls"] == ([number] if number in leaders else [])

        named, derived, bug = once["failures"]
        assert named == ("MethodError", "the estimator failed", "\nline 1 of the user's file")
        kind = "Derived" if number in leaders else "MethodError"
        assert derived == (kind, "the estimator failed", "None")
        if number in leaders:
            assert bug == ("KeyError", "'a bug'", "None")
        else:
            assert bug[0] == "RuntimeError" and bug[1].endswith("KeyError: 'a bug'")
            assert "in compute" in bug[2]  # the place in the file


@pytest.mark.parametrize("name", MACHINES)
def test_every_rank_sees_the_samples_of_all_replicas(
    ranks: list[dict[str, Any]], name: str
) -> None:
    tokens = []
    for row in range(BATCH):
        there = [row * 10 + place for place in range(row % 5)]
        tokens.append(there + [0] * (4 - len(there)))
    facts = [(row % 5, 1, int(row % 2 == 0)) for row in range(BATCH)]
    counts = [len(_recorded(row)) for row in range(BATCH)]
    masks = [_masks(row, row % 5) for row in range(BATCH)]
    versions = [row for row in range(BATCH) for _ in range(row % 5)]
    experts = np.concatenate([_recorded(row) for row in range(BATCH)]).tolist()

    for rank in ranks:
        for exchanged, steps in zip(rank[name]["exchanged"], ([1, 2, 3, 4], [1, 2]), strict=True):
            replicas = len(steps)
            headers = [
                (row, *facts[row], row % replicas, counts[row], len(masks[row].words))
                for row in range(BATCH)
            ]
            assert exchanged["rows"] == list(range(BATCH))
            assert exchanged["tokens"] == tokens
            assert exchanged["logprobs"] == [[-token / 8 for token in row] for row in tokens]
            assert exchanged["in parts"] and exchanged["headers"] == headers
            assert exchanged["versions"] == versions
            assert exchanged["experts"] == experts
            assert exchanged["steps"] == steps

            rows_begun = (0, 1, 2, 3) if replicas == 4 else (0, 1, 2, 3, 6, 7, 10, 11)
            begun = {row: min(2, row % 5) for row in rows_begun}
            assert exchanged["open"] == {
                row: (
                    tokens[row][:n],
                    [-t / 8 for t in tokens[row][:n]],
                    [(n, row)],
                    _masks(row, n),
                )
                for row, n in begun.items()
            }
            chosen = exchanged["chosen"]
            assert chosen["tokens"] == [tokens[row] for row in CHOSEN]
            assert chosen["logprobs"] == [[-t / 8 for t in tokens[row]] for row in CHOSEN]
            assert chosen["experts"] == np.concatenate([_recorded(r) for r in CHOSEN]).tolist()
            assert chosen["masks"] == [word for row in CHOSEN for word in masks[row].words]
            assert chosen["mask counts"] == [
                [*masks[row].counts, *[0] * (4 - row % 5)] for row in CHOSEN
            ]
            assert chosen["headers"] == [(new, *headers[row][1:]) for new, row in enumerate(CHOSEN)]
            assert chosen["versions"] == [row for row in CHOSEN for _ in range(row % 5)]


def test_shared_memory_has_no_name_that_could_be_left_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, afterwards = rank["freed"]
        assert len(before) == 1 and before[0].startswith("/memfd:mrlhf-")
        assert before[0].endswith(" (deleted)") and afterwards == []


_memfd_create = os.memfd_create
_readlink = os.readlink


def _refuse(name: str) -> None:
    raise OSError("no memory of this kind")


def _make_a_strangers_file(name: str) -> int:
    """A file that is not the one asked for, as where two machines have one name."""
    return _memfd_create("a stranger's")
