"""Finds the replica of a model that is slow, so that all others wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from mrlhf.parallel.collectives import all_gather_ragged


class SlowestReplica(NamedTuple):
    """The slowest replica: its time over the median of the others, and its first rank."""

    ratio: float
    rank: int


def compare_replicas(time: float, rank: int, group: ProcessGroup) -> SlowestReplica | None:
    """Find the slowest replica; every rank of the group calls it.

    The group has one rank or more of each replica, of which the slowest counts. `time` is this
    rank's for a unit of work, in any unit, 0 if it had no work; `rank` is its replica's first.
    """
    mine = torch.tensor([[time, rank]], dtype=torch.float64)
    times: dict[int, float] = {}
    for spent, number in torch.cat(all_gather_ragged(mine, group)).tolist():
        times[int(number)] = max(spent, times.get(int(number), 0.0))
    return slowest_replica(times)


def slowest_replica(times: Mapping[int, float]) -> SlowestReplica | None:
    """The slowest replica by the `times` of first ranks; None unless two had work."""
    measured = sorted((time, rank) for rank, time in times.items() if time)
    if len(measured) < 2:
        return None
    *others, (longest, rank) = measured
    return SlowestReplica(longest / median(time for time, _ in others), rank)
