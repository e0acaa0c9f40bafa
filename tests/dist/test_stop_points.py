"""Ranks agree on where to stop: on any stretches of work, and in the passes of a sharded model."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from mrlhf.errors import Interrupted
from mrlhf.parallel.agreed_stop import AgreedStop
from tests.ranks import run_ranks

RANKS = 4
ROUNDS = 20


class Looking:
    """Calls `look` in a thread of its own, as a watcher does, at moments of its own."""

    def __init__(self, stops: AgreedStop, pause: Callable[[], float]) -> None:
        self._stops = stops
        self._pause = pause
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._pause()):
            self._stops.look()


def _random_stretches(rank: int, world_size: int) -> list[tuple[list[int], list[int], str, bool]]:
    """In each round: the units begun in each stretch, the refused ones, the reason, whether the
    next stretch may begin.

    The ranks of a round have the same number of stretches, with a collective in some of them, and
    each rank its own number of units and its own speed.
    """
    assert dist.group.WORLD is not None
    store = dist.distributed_c10d._get_default_store().clone()
    outcomes = []
    for number in range(ROUNDS):
        shared = random.Random(number)
        own = random.Random(f"{number} {rank}")
        stops = AgreedStop(dist.PrefixStore(f"round {number}", store), rank, world_size)
        stretches = [shared.choice(["units", "lock-step", "empty"]) for _ in range(6)]
        asks = rank == shared.randrange(world_size) or own.random() < 0.2
        asks_at = own.randrange(30)
        with Looking(stops, lambda own=own: own.random() * 0.01):
            outcomes.append(_round(stops, stretches, shared, own, asks_at if asks else None))
    return outcomes


def _round(
    stops: AgreedStop,
    stretches: list[str],
    shared: random.Random,
    own: random.Random,
    asks_at: int | None,
) -> tuple[list[int], list[int], str, bool]:
    begun = []
    refused = []
    timer = None
    if asks_at is not None:
        timer = threading.Timer(asks_at * 0.001, stops.ask, ["because"])
        timer.start()
    reason = ""
    try:
        for kind in stretches:
            begun.append(0)
            common = shared.randrange(1, 12)
            units = {"units": own.randrange(8), "lock-step": common, "empty": 0}[kind]
            with stops.stretch() as may_begin:
                for unit in range(units):
                    if may_begin(unit):
                        assert not refused
                        begun[-1] += 1
                    else:
                        refused.append(unit)
                    if kind == "lock-step":
                        dist.barrier()
                    else:
                        time.sleep(own.random() * 0.002)
            assert not refused
    except Interrupted as interrupted:
        reason = str(interrupted)

    if timer is not None:
        timer.join()
    may_save = True
    if reason:  # the stop is spent
        with stops.stretch() as may_begin:
            may_save = may_begin(0)
    dist.barrier()
    return begun, refused, reason, may_save


def test_all_ranks_stop_at_the_same_place() -> None:
    ranks = run_ranks(RANKS, _random_stretches)
    stopped = 0
    for outcomes in zip(*ranks, strict=True):
        assert len({(len(begun), reason) for begun, _, reason, _ in outcomes}) == 1
        assert all(may_save for *_, may_save in outcomes)
        stopped += outcomes[0][2] == "because"

        # One unit is the first that is refused; nobody has gone beyond it.
        first_refused = [refused[0] for _, refused, _, _ in outcomes if refused]
        assert len(set(first_refused)) <= 1
        for begun, refused, _, _ in outcomes:
            if first_refused:
                assert begun[-1] <= first_refused[0]
            assert refused == list(range(begun[-1], begun[-1] + len(refused)))
    assert stopped > ROUNDS // 3
