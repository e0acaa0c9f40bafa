"""A rank of a test starts as a new process does, though its modules have been imported before."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks


def _start(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank starts with, and how many threads its server has (1 without a /proc)."""
    threads = Path(f"/proc/{os.getppid()}/task")
    return {
        "random": (random.random(), np.random.rand(), torch.rand(1).item()),
        "environment": [os.environ.get(name) for name in ("MRLHF_TEST_SETTING", "PYTHONPATH")],
        "place": (os.environ["RANK"], os.environ["WORLD_SIZE"]),
        "torch threads": torch.get_num_threads(),
        "server threads": len(list(threads.iterdir())) if threads.exists() else 1,
        "cuda": torch.cuda.is_initialized(),
    }


def test_a_rank_is_like_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for setting in ("first", "second"):
        monkeypatch.setenv("MRLHF_TEST_SETTING", setting)
        for rank, found in enumerate(run_ranks(2, _start)):
            drawn += found.pop("random")
            assert found == {
                "environment": [setting, os.environ.get("PYTHONPATH")],
                "place": (str(rank), "2"),
                "torch threads": 1,
                "server threads": 1,
                "cuda": False,
            }

    assert len(set(drawn)) == 12, "two ranks draw the same random numbers"


def _ends(rank: int, world_size: int) -> None:
    """As if it were killed."""
    os._exit(3)


def _crashes(rank: int, world_size: int) -> None:
    os.abort()


def test_a_rank_that_is_killed_is_not_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] have ended and returned nothing"):
        run_ranks(1, _ends)
    with pytest.raises(
        AssertionError, match=r"returned nothing\nrank 0\nFatal.* Aborted[^$]* in _cr"
    ):
        run_ranks(1, _crashes)
