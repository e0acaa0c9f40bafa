"""Runs a function in several gloo ranks on this machine, for tests. It knows nothing of what it
runs.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _main(
    rank: int,
    world_size: int,
    port: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    queue: Any,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
        )
        queue.put((rank, True, body(rank, world_size, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
        raise


def run_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, timeout: float = 300.0
) -> list[Any]:
    """Call the module-level function `body(rank, world_size, *args)` in `world_size` spawned ranks.

    Returns:
        What each rank returned (picklable, no tensors that share memory), by rank.

    Raises:
        AssertionError: a rank failed; the message is the traceback of the first one to fail.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_main, args=(rank, world_size, port, body, args, queue), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in range(world_size):
            rank, succeeded, value = queue.get(timeout=timeout)
            assert succeeded, f"rank {rank} failed:\n{value}"
            results[rank] = value
        for process in ranks:
            process.join(timeout=60)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world_size)]
