"""What the doctor measures of ranks that are alike."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import torch.distributed as dist

from mrlhf.device import pick_device
from mrlhf.doctor.machine import Measured, measure_ranks
from tests.pages import ROOT, commands_of
from tests.ranks import run_ranks


def _measured(rank: int, world_size: int) -> tuple[list[Measured], dict[str, float]]:
    assert dist.is_initialized()
    return measure_ranks(pick_device("cpu", local_rank=rank))


def test_every_rank_knows_what_each_has_measured() -> None:
    [(every, speeds), (same, _)] = run_ranks(2, _measured)
    assert every == same and [each.rank for each in every] == [0, 1]
    assert speeds.keys() == {"all-reduce", "all-to-all"}
    for each in every:
        assert min(each.gflops, each.link, *speeds.values()) > 0
        assert abs(each.clock) < 0.5  # of one machine


def test_the_commands_of_its_page() -> None:
    programs = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }

    for command in commands_of("docs/operations.md", "doctor.py"):
        program, *arguments = shlex.split(command)
        done = subprocess.run(
            [*programs[program], *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " 0 broken\n" in done.stdout
        assert ("2 on 1 host" in done.stdout) == (program == "torchrun")
