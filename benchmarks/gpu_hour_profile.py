"""Profiles one step of a run of PPO: the largest costs, and how long the GPU has nothing to do.

    python launch/torchrun.py --standalone --nproc-per-node=1 benchmarks/gpu_hour_profile.py \\
        --json FILE --step 3 <arguments of launch/train_ppo.py>

It runs all of train_ppo; what rank 0 does in one step goes through torch's profiler. The profiler
slows the host, so idle shares are upper bounds. On a CPU the costs are operators' own seconds, and
there are no idle shares.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_record import write_json
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mrlhf.commands import train
from mrlhf.trainers.ppo.resume import Drawing, Updating
from mrlhf.trainers.ppo.step import PPOTrainer

LARGEST = 10

Interval = tuple[float, float]
"""Begin and end, in one unit of time."""


def main() -> int:
    """Run the program with one step profiled; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--step", type=int, default=3, help="what only the first ones do is left out"
    )
    arguments, of_program = parser.parse_known_args()
    real = PPOTrainer.step

    def step(self: PPOTrainer, state: Drawing | Updating) -> dict[str, float]:
        if state.number != arguments.step or os.environ["RANK"] != "0":
            return real(self, state)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            metrics = real(self, state)
        phases = [name.removeprefix("timing_s/") for name in metrics if "timing_s/" in name]
        write_json(arguments.json, summary(profiler.events(), phases))
        return metrics

    sys.argv[1:] = of_program
    with mock.patch.object(PPOTrainer, "step", step):
        return train.ppo()


def summary(events: Sequence[Any], phases: Sequence[str]) -> dict[str, Any]:
    """Seconds, kernels and idle share of each phase, and the largest costs of the whole step."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    # Ranges of the host appear among what the device does too.
    ranges = {event.name for event in on_host}
    on_device = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and event.name not in ranges
    ]
    busy = [(event.time_range.start, event.time_range.end) for event in on_device]

    found = {}
    for phase in phases:
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in on_host
            if event.name == phase
        ]
        if spans:
            found[phase] = _phase(spans, busy)

    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in on_device or on_host:
        if on_device or event.name not in found:
            seconds[event.name] += _own_seconds(event, bool(on_device))
            calls[event.name] += 1
    total = sum(seconds.values())
    costs = [
        {"name": name, "calls": calls[name], "seconds": spent, "share": spent / total}
        for name, spent in seconds.most_common(LARGEST)
    ]
    return {"phases": found, "costs": costs}


def _phase(spans: Sequence[Interval], busy: Sequence[Interval]) -> dict[str, Any]:
    length = sum(end - begin for begin, end in spans)
    inside = [pair for pair in busy if any(b <= pair[0] < e for b, e in spans)]
    return {
        "seconds": length / 1e6,
        "kernels": len(inside),
        "idle_share": 1.0 - covered(inside) / length if busy else None,
    }


def covered(intervals: Iterable[Interval]) -> float:
    """The time in at least one of the intervals, which may overlap."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _own_seconds(event: Any, on_device: bool) -> float:
    if on_device:
        return float(event.time_range.elapsed_us()) / 1e6
    return float(event.self_cpu_time_total) / 1e6


if __name__ == "__main__":
    sys.exit(main())
