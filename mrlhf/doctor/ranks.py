"""Checks of the ranks of a job: what each computes, the links between them, and their clocks."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.device import Device
from mrlhf.doctor.findings import Finding, judged, ok
from mrlhf.parallel.collectives import all_gather_objects

_BYTES = 16 * 2**20
_ROUNDS = 5
_LATE_S = 0.5
_SLOW = 0.5  # of the median


@dataclass(frozen=True)
class Measured:
    """What one rank has measured."""

    rank: int
    host: str
    gflops: float  # of a product of matrices
    link: float  # GB/s from the rank before it
    clock: float  # seconds by which its clock is ahead of that of rank 0


def measure(device: Device) -> tuple[list[Measured], dict[str, float]]:
    """Measure this rank, with all others; returns what each measured, and GB/s of collectives."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    matrix = torch.ones(512, 512, device=device.torch_device)
    product_s = _median_seconds(lambda: matrix @ matrix, device)
    own = Measured(
        rank=rank,
        host=platform.node(),
        gflops=2 * 512**3 / product_s / 1e9,
        link=_BYTES / _ring_seconds(rank, world, device) / 1e9 if world > 1 else math.inf,
        clock=_clock_ahead(rank, world),
    )
    every = all_gather_objects(own, None)

    speeds = {}
    if world > 1:
        sent = _numbers(device, _BYTES // 4)
        reduce_s = _median_seconds(lambda: dist.all_reduce(sent), device)
        shared = _numbers(device, _BYTES // 4 // world * world)
        others = torch.empty_like(shared)
        share_s = _median_seconds(lambda: dist.all_to_all_single(others, shared), device)
        speeds = {"all-reduce": _BYTES / reduce_s / 1e9, "all-to-all": _BYTES / share_s / 1e9}
    return every, speeds


def _median_seconds(work: Callable[[], object], device: Device) -> float:
    """The median seconds of the work, after a round that is not counted."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _ring_seconds(rank: int, world: int, device: Device) -> float:
    """Seconds in which each rank sends to the next one and gets the previous one's."""
    sent = _numbers(device, _BYTES // 4)
    received = torch.empty_like(sent)

    def exchange() -> None:
        work = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for each in dist.batch_isend_irecv(work):
            each.wait()

    return _median_seconds(exchange, device)


def _numbers(device: Device, count: int) -> Tensor:
    return torch.ones(count, device=device.torch_device)


def judge(measured: Sequence[Measured], speeds: dict[str, float]) -> Iterator[Finding]:
    """Look for ranks that are much slower than the others, and for clocks that differ."""
    hosts = sorted({each.host for each in measured})
    yield ok("ranks", f"{len(measured)} on {len(hosts)} {'hosts' if len(hosts) > 1 else 'host'}")
    yield from _slowest(measured, "product", "GFLOP/s", lambda each: each.gflops)
    if len(measured) > 1:
        yield from _slowest(measured, "link", "GB/s", lambda each: each.link)
    for name, speed in speeds.items():
        yield ok(name, f"{speed:.2f} GB/s, {_BYTES // 2**20} MB a rank")
    for host in hosts:
        ahead = next(each.clock for each in measured if each.host == host)
        if abs(ahead) > _LATE_S:
            way = "ahead of" if ahead > 0 else "behind"
            yield Finding(
                "look",
                "clocks",
                f"that of {host} is {abs(ahead):.1f} s {way} that of {measured[0].host}",
                "let both follow a time server; times in logs and timelines do not fit otherwise",
            )


def _slowest(
    measured: Sequence[Measured], name: str, unit: str, speed: Callable[[Measured], float]
) -> Iterator[Finding]:
    median = statistics.median(map(speed, measured))
    slow = [each for each in measured if speed(each) < _SLOW * median]
    whom = ", ".join(f"rank {each.rank} on {each.host} {speed(each):.2f}" for each in slow)
    shown = f"median {median:.2f} {unit}"
    yield judged(
        not slow,
        name,
        f"{shown}; slow: {whom}" if slow else shown,
        "every step waits for the slowest rank: look for other programs there, for a GPU that is "
        "throttled, or for a network interface that is not the fast one (NCCL_SOCKET_IFNAME)",
    )


def _clock_ahead(rank: int, world: int) -> float:
    """Seconds by which this rank's clock is ahead of that of rank 0."""
    ahead = 0.0
    for other in range(1, world):
        for _ in range(3):  # the last one counts, since the first connects
            moment = torch.tensor([time.time()], dtype=torch.float64)
            if rank == other:
                asked = time.time()
                dist.send(moment, 0)
                dist.recv(moment, 0)
                ahead = (asked + time.time()) / 2 - float(moment)
            elif rank == 0:
                dist.recv(moment, other)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
    return ahead
