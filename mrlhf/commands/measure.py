"""`mrlhf plan --measure`: starts ranks that measure this machine, and writes the file of it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch.distributed as dist

from mrlhf.commands.entry import start_ranks
from mrlhf.device import Device, pick_device
from mrlhf.errors import ConfigError
from mrlhf.parallel.job import init_distributed, read_place
from mrlhf.planning.machine_file import machine_text
from mrlhf.printable import show

_TIMEOUT_S = 120.0


def measure_into(file: Path, ranks: int) -> int:
    """Measure with so many ranks, or with those that torchrun has started; returns an exit code.

    Raises:
        ConfigError: there is no such number of ranks.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} is below 1")
    file.parent.mkdir(parents=True, exist_ok=True)
    if "RANK" not in os.environ:
        return start_ranks(ranks, "plan", ["--measure", str(file)])

    # megatron-core's hints to its own authors.
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # The import takes seconds, and a mistake in the arguments has not to wait for it.
    from mrlhf.planning.measure import EFFORTS, measure

    place = read_place()
    device = pick_device("auto", place.local_rank)
    init_distributed(device, _TIMEOUT_S)
    try:
        gpu = measure(device, EFFORTS[device.kind])
    finally:
        dist.destroy_process_group()
    if place.rank == 0:
        file.write_text(machine_text(gpu, _about(device, place.world_size)), encoding="utf-8")
        show(f"wrote {file}: give it to mrlhf plan --gpu")
    return 0


def _about(device: Device, ranks: int) -> str:
    """What was measured."""
    seen = device.describe()
    threads = f"{seen['threads']} threads a rank, " if device.kind == "cpu" else ""
    return (
        f"mrlhf plan --measure, {ranks} ranks: {seen['device']}, {threads}torch {seen['torch']}; "
        "network_gb_s and host_gb_s are not measured"
    )
