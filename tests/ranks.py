"""Runs a function in several gloo ranks on this machine, for tests. It does not know what it runs.

The ranks are forks of one server process that has imported `tests/preloaded.py`: that takes a
moment, where importing torch and megatron-core anew takes seconds. In all else a rank starts as a
new process does, except that all ranks of a test run hash strings alike.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import preloaded

_LEAVES = 600.0  # seconds in which a rank that is done ends
_ASKS = 1.0  # seconds after which it looks whether a rank has been killed
_BEFORE = 30.0  # seconds before its time is over a rank writes where it is
_WAITS = timedelta(seconds=1200)  # for another rank


def fork_server() -> BaseContext:
    """The context that starts ranks; its server starts with the first ranks and lasts."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([preloaded.__name__])

    # The server is a new interpreter, which reads these as it starts and as it imports torch.
    variables = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",  # a fork copies one thread only
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looks for a GPU without opening it
    }
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()
    return context


def _main(
    rank: int,
    world_size: int,
    port: int,
    environment: dict[str, str],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    results: Any,
    stacks: str,
    timeout: float,
) -> None:
    assert os.getppid() == preloaded.IMPORTED_BY, "the fork server has not preloaded its modules"

    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")  # the port's store is not for rank 0
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    file = (Path(stacks) / str(rank)).open("w")
    faulthandler.enable(file)
    faulthandler.dump_traceback_later(max(1.0, timeout - _BEFORE), file=file)

    # A fork has the random numbers of its server; a rank that forgets to seed must have its own.
    torch.seed()
    np.random.seed()

    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=_WAITS
        )
        results.put((rank, True, body(rank, world_size, *args)))
        faulthandler.dump_traceback_later(_LEAVES - _BEFORE, file=file)
        gc.collect()  # a fork leaves without destructors, and an engine may hold shared memory
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise


def everyone() -> dist.ProcessGroup:
    """The group of all ranks, in one of them."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, timeout: float = 3000.0
) -> list[Any]:
    """Call the module-level function `body(rank, world_size, *args)` in `world_size` processes.

    The processes have the environment variables of this process, and those that torchrun would set.

    Returns:
        What each rank returned (picklable, no tensors that share memory), by rank.

    Raises:
        AssertionError: a rank failed, and the message is the traceback of the first one to fail,
            and where others crashed; or a rank was killed; or ranks were not done in time, and it
            says where they were.
    """
    # This process keeps the store: a port that is chosen here and opened by rank 0 could be taken
    # in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_server()
    received = context.Queue()
    environment = dict(os.environ)
    ranks = []

    with tempfile.TemporaryDirectory() as stacks:
        for rank in range(world_size):
            rest = (store.port, environment, body, args, received, stacks, timeout)
            place = (rank, world_size, *rest)
            ranks.append(context.Process(target=_main, args=place, daemon=True))
            ranks[-1].start()
        try:
            return _results(ranks, received, timeout, Path(stacks))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()


def _results(ranks: list[Any], received: Any, timeout: float, stacks: Path) -> list[Any]:
    """What the ranks return, once all of them have ended."""
    results: dict[int, Any] = {}
    late = time.monotonic() + timeout
    while len(results) < len(ranks):
        # A rank that is seen to have ended may still have said something before.
        ended = [rank for rank, process in enumerate(ranks) if not process.is_alive()]
        try:
            rank, succeeded, value = received.get(timeout=_ASKS)
        except queue.Empty:
            gone = [rank for rank in ended if rank not in results]
            where = _written(stacks)
            assert not gone, f"ranks {gone} have ended and returned nothing\n{where}"
            assert time.monotonic() < late, f"not done after {timeout:.0f} s:\n{where}"
            continue
        assert succeeded, f"rank {rank} failed:\n{value}\n{_written(stacks)}"
        results[rank] = value

    for rank, process in enumerate(ranks):
        process.join(timeout=_LEAVES)
        assert not process.is_alive(), f"rank {rank} is done and stays:\n{_written(stacks)}"
    return [results[rank] for rank in range(len(ranks))]


def _written(stacks: Path) -> str:
    """Where ranks crashed, or where they were shortly before their time was over."""
    texts = {file.name: file.read_text() for file in sorted(stacks.iterdir())}
    return "\n".join(f"rank {rank}\n{text}" for rank, text in texts.items() if text)
