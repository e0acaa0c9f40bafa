"""Measures how fast the ranks of a job compute and exchange; it does not judge what it measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.device import Device

_ROUNDS = 5


def median_seconds(work: Callable[[], object], device: Device, rounds: int = _ROUNDS) -> float:
    """The median seconds of the work, after a round that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def ring_seconds(device: Device, nbytes: int) -> float:
    """Seconds in which each rank sends so many bytes to the next and gets the previous one's."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    sent = _numbers(device, nbytes)
    received = torch.empty_like(sent)

    def exchange() -> None:
        work = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for each in dist.batch_isend_irecv(work):
            each.wait()

    return median_seconds(exchange, device)


def all_reduce_seconds(device: Device, nbytes: int, rounds: int = _ROUNDS) -> float:
    """Seconds in which all ranks add up so many bytes."""
    numbers = _numbers(device, nbytes)
    return median_seconds(lambda: dist.all_reduce(numbers), device, rounds)


def all_to_all_seconds(device: Device, nbytes: int) -> float:
    """Seconds in which each rank shares out so many bytes among all."""
    world = dist.get_world_size()
    numbers = _numbers(device, nbytes // 4 // world * world * 4)
    others = torch.empty_like(numbers)
    return median_seconds(lambda: dist.all_to_all_single(others, numbers), device)


def _numbers(device: Device, nbytes: int) -> Tensor:
    return torch.ones(nbytes // 4, device=device.torch_device)
