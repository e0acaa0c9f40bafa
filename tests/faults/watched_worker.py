"""A worker with the real watcher, for `test_launcher`: it counts or hangs until it is stopped.

Arguments: a directory for its notes, and what to do.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mrlhf.device import pick_device
from mrlhf.errors import Interrupted
from mrlhf.log import configure_logging
from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.job import init_distributed
from mrlhf.parallel.phases import Phases
from mrlhf.run.leaving import end_with_launcher
from mrlhf.run.watcher import Watcher

TIMEOUT_S = 600.0


def main() -> None:
    directory = Path(sys.argv[1])
    behaviour = sys.argv[2]
    end_with_launcher()
    job = init_distributed(pick_device("cpu", 0), TIMEOUT_S)
    configure_logging(job.rank)
    stops = AgreedStop(dist.PrefixStore("stop", job.store), job.rank, job.world_size)
    phases = Phases(stops)
    watcher = Watcher(job.store, job.rank, job.world_size, directory, TIMEOUT_S, phases)
    watcher.start()

    sys.stdout.write("not flushed yet")
    note = directory / f"rank_{job.rank}.txt"
    note.write_text(f"process {os.getpid()}\n")
    if behaviour == "hangs":
        hang(job.rank)
    try:
        count(phases)
    except Interrupted:
        dist.barrier()
        os._exit(75)


def hang(rank: int) -> None:
    """Wait for the last rank, which never comes."""
    while rank == 1:
        time.sleep(1.0)
    dist.all_reduce(torch.zeros(1))


def count(phases: Phases) -> None:
    """Count until the run is stopped."""
    with phases.interruptible() as may_begin:
        for unit in itertools.count():
            if not may_begin(unit):
                break
            time.sleep(0.01)


if __name__ == "__main__":
    main()
