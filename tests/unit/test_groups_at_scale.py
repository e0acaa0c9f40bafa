"""What one of thousands of ranks does to make groups, with the job's store, and with all others.

Groups are made with torch's fake backend; the store is one in memory in which the other ranks have
done their part. `python -m tests.unit.test_groups_at_scale` prints the tables of tests/counted.md.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import Launch, meet, polling_s
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.phases import Phases
from mrlhf.run import same_start
from mrlhf.run.failures import Failure, Failures
from mrlhf.run.hangs import Answer, HangReports

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "counted.md"
GATHERS = {
    "all_gather_object",
    "all_gather_objects",
    "all_gather_ragged",
    "broadcast_object_list",
    "compare_replicas",
    "from_first",
    "gather_object",
    "raise_together",
    "together",
}
RANKS_OF_A_MACHINE = 8
ACTOR = AxisSizes(tp=8, pp=4)
CRITIC = AxisSizes(tp=4, cp=2)
WORLDS = (256, 1024, 4096)


@dataclass(frozen=True)
class Cost:
    """What one rank does to make all groups.

    Attributes:
        calls: of new_group.
        own: groups that the rank is in, that of all ranks included.
        connections: of gloo, to the other ranks of these groups.
        addresses: that the ranks of all groups leave in the store, for one rank to look up.
    """

    calls: int
    own: int
    connections: int
    addresses: int


@contextmanager
def _faked(rank: int, world_size: int) -> Iterator[list[tuple[int, ...]]]:
    """A job of which only this rank exists; gives the ranks of each group that is made."""
    made: list[tuple[int, ...]] = []
    real = dist.new_group

    def new_group(ranks: list[int], **options: object) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return real(ranks, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(dist, "new_group", new_group):
            yield made
    finally:
        dist.destroy_process_group()


def _cost(rank: int, world_size: int) -> Cost:
    with _faked(rank, world_size) as made:
        names = [f"machine {other // RANKS_OF_A_MACHINE}" for other in range(world_size)]
        factory = GroupFactory(timeout_s=60.0, machines=names)
        for role, sizes in (("actor", ACTOR), ("critic", CRITIC)):
            factory.role_groups(ParallelLayout.for_world(role, world_size, sizes))
    own = [tuple(range(world_size)), *(ranks for ranks in made if rank in ranks)]
    return Cost(
        calls=len(made),
        own=len(own),
        connections=sum(len(ranks) - 1 for ranks in own),
        addresses=sum(len(ranks) for ranks in own),
    )


class CountedStore(dist.Store):
    """A store in memory that counts how often it is asked, and for how many keys."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self.requests = 0
        self.keys = 0

    def _count(self, keys: int = 1) -> None:
        self.requests += 1
        self.keys += keys

    def set(self, key: str, value: str | bytes) -> None:
        self._count()
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self._count()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._count(len(keys))
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count(len(keys))
        return [self._values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count()
        return self._values.setdefault(key, desired.encode())

    def forget(self) -> None:
        """Begin to count, once the other ranks have done their part."""
        self.requests = 0
        self.keys = 0


@dataclass(frozen=True)
class Asked:
    """What one rank asks of the store."""

    requests: int
    keys: int  # in these requests


def _meet(store: CountedStore, rank: int, world_size: int) -> None:
    for other in range(world_size):
        store.set(f"number of rank {other}", f"number {other}")
        store.set(f"own is known to rank {other}", "1")
    store.set("the answer to own", "own")
    store.forget()
    with mock.patch.object(secrets, "token_hex", lambda _: "own"):
        meet(store, Launch(rank, world_size, 0), 60.0, None)


def _compare_starts(store: CountedStore, rank: int, world_size: int) -> None:
    digest = same_start.xxhash.xxh3_128(json.dumps({}).encode()).hexdigest()
    for other in range(world_size):
        store.set(f"start of rank {other}", digest)
    if rank > 0:
        store.set("facts of rank 0", "alike")
        store.set("verdict", "alike")
    store.forget()
    joined: Any = lambda *_: store  # noqa: E731
    with (
        mock.patch.object(same_start, "connect", joined),
        mock.patch.object(same_start, "meet", joined),
    ):
        same_start.require_same_start(Launch(rank, world_size, 0), {}, 60.0, lambda: None)


def _look(store: CountedStore, rank: int, world_size: int) -> None:
    with TemporaryDirectory() as directory:
        hangs = HangReports(store, rank, world_size, Path(directory), Phases())
        Failures(store, rank, world_size).look()
        AgreedStop(store, rank, world_size).look()
        hangs.look()


def _stop(store: CountedStore, rank: int, world_size: int) -> None:
    for other in range(world_size):
        store.set(f"place of rank {other}", "0")
    store.set("reason", "its time is up")
    if rank > 0:
        store.set("stop", "1")
    store.forget()
    AgreedStop(store, rank, world_size).look()


def _fail(store: CountedStore, rank: int, world_size: int) -> None:
    for other in range(world_size):
        store.set(f"rank {other} has heard", "1")
    own = Failure(rank, 1, "it fails", 0.0)
    if rank > 0:
        store.set("failure", json.dumps(asdict(Failure(0, 1, "it fails", 0.0))))
    store.forget()
    failures = Failures(store, rank, world_size)
    failures._publish(own) if rank == 0 else failures.look()


def _report_hang(store: CountedStore, rank: int, world_size: int) -> None:
    for other in range(world_size):
        answer = Answer("step", 1.0, True, "here")
        store.set(f"answer 0 of rank {other}", json.dumps(asdict(answer)))
    if rank > 0:
        store.set("question 0", "folder")
    store.forget()
    with TemporaryDirectory() as directory:
        reports = HangReports(store, rank, world_size, Path(directory), Phases())
        reports.report(since=0.0) if rank == 0 else reports.look()


# By its name in tests/counted.md.
EVENTS: dict[str, Callable[[CountedStore, int, int], None]] = {
    "to agree on the attempt's name, twice at the start": _meet,
    "to compare configuration, code and inputs at the start": _compare_starts,
    "a look of the watcher": _look,
    "to agree on where to stop, after a signal": _stop,
    "to learn that a rank has failed (rank 0: to report it)": _fail,
    "to answer where it is (rank 0: to report a hang)": _report_hang,
}


def _asked(event: str, rank: int, world_size: int) -> Asked:
    store = CountedStore()
    EVENTS[event](store, rank, world_size)
    return Asked(store.requests, store.keys)


@pytest.mark.parametrize("event", EVENTS)
def test_what_ranks_ask_of_the_store_grows_no_faster_than_ranks(event: str) -> None:
    first = {world_size: _asked(event, 0, world_size) for world_size in WORLDS}
    last = {world_size: _asked(event, world_size - 1, world_size) for world_size in WORLDS}
    assert set(last.values()) == {last[WORLDS[0]]}, "as much in every job"
    for world_size in WORLDS:
        growth = world_size / WORLDS[0]
        assert first[world_size].requests <= first[WORLDS[0]].requests * growth
        assert first[world_size].keys <= first[WORLDS[0]].keys * growth


def test_a_step_asks_nothing_of_the_store() -> None:
    store = CountedStore()
    phases = Phases(AgreedStop(store, 0, 4096))
    for _ in range(2):
        with phases.enter("step"), phases.interruptible() as may_begin:
            for unit in range(3):
                phases.advance(unit, 3, "micro-batches")
                assert may_begin(unit)
    assert store.requests == 0


def test_a_large_job_looks_into_the_store_more_rarely() -> None:
    assert polling_s(8, 0.02) == 0.02
    assert polling_s(1024, 0.5) == 0.5
    assert [count / polling_s(count, 0.5) for count in (4096, 16384)] == [4000, 4000]


def _page() -> str:
    return PAGE.read_text(encoding="utf-8")


def tables() -> tuple[str, str]:
    """The tables of groups and of requests to the store, as tests/counted.md has them."""
    lines = [
        "| ranks | calls of `new_group` | groups of the rank | connections of gloo at most |",
        "|---|---|---|---|",
    ]
    for world_size in WORLDS[1:]:
        cost = _cost(0, world_size)
        cells = [world_size, cost.calls, cost.own, cost.connections]
        lines.append(f"| {' | '.join(f'{cell:,}' for cell in cells)} |")

    asked_lines = [
        "| what a rank asks of the store | rank 0 of 1,024 | rank 0 of 4,096 | another |",
        "|---|---|---|---|",
    ]
    for event in EVENTS:
        cells = [_asked(event, 0, 1024), _asked(event, 0, 4096), _asked(event, 4095, 4096)]
        shown = [f"{asked.requests:,} / {asked.keys:,}" for asked in cells]
        asked_lines.append(f"| {event} | {' | '.join(shown)} |")
    return "\n".join(lines), "\n".join(asked_lines)


def test_the_page_has_these_tables() -> None:
    page = _page()
    assert all(table in page for table in tables()), (
        "python -m tests.unit.test_groups_at_scale prints them"
    )


def test_the_page_names_every_file_in_which_ranks_gather_objects() -> None:
    found = set()
    for file in sorted((ROOT / "mrlhf").rglob("*.py")):
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
        }
        if called & GATHERS:
            found.add(file.relative_to(ROOT / "mrlhf").as_posix())
    named = re.findall(r"^\| `([a-z_/]+\.py)` \|", _page(), re.MULTILINE)
    assert sorted(found - {"parallel/collectives.py"}) == sorted(named)


@pytest.mark.parametrize("place", ["first", "second", "last"])
def test_groups_grow_no_faster_than_ranks(place: str) -> None:
    costs = {}
    for world_size in WORLDS:
        rank = {"first": 0, "second": 1, "last": world_size - 1}[place]
        costs[world_size] = _cost(rank, world_size)

    smallest = costs[WORLDS[0]]
    for world_size, cost in costs.items():
        growth = world_size / WORLDS[0]
        assert cost.own <= min(16, smallest.own)
        assert cost.calls <= smallest.calls * growth
        assert cost.calls < 2 * world_size, "a rank makes no group of one other rank"
        assert cost.connections <= min(smallest.connections * growth * 1.05, 4 * world_size)
        assert cost.addresses <= smallest.addresses * growth * 1.05


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
