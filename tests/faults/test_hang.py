"""A rank that hangs is named, with its phase, and the stacks of all ranks are written down."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mrlhf.device import Device
from mrlhf.errors import HangError
from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.phases import Phases
from mrlhf.run.board import Board
from mrlhf.run.startup import Run
from mrlhf.run.watcher import Watcher
from tests.ranks import run_ranks

TIMEOUT_S = 5.0
STALL_S = 1.0
CPU = Device("cpu", torch.device("cpu"))


def user_reward(store: dist.Store) -> None:
    """Hang until the others have given up."""
    while not store.check(["over"]):
        time.sleep(0.05)


def _in_ranks(rank: int, world_size: int, root: str) -> tuple[str, list[str]]:
    """The error of the rank, and what it has logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mrlhf").addHandler(handler)

    store = dist.distributed_c10d._get_default_store().clone()
    impatient = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    directory = Path(root)
    phases = Phases(AgreedStop(dist.PrefixStore("stop", store), rank, world_size))
    watcher = Watcher(store, rank, world_size, directory, STALL_S, phases)
    watcher.start()
    run = Run(
        CPU,
        rank,
        world_size,
        GroupFactory(600.0),
        directory,
        watcher=watcher,
        board=Board(phases),
    )
    error = ""
    try:
        with run:
            dist.barrier()  # so that no rank is still on its way when the others stall
            with phases.enter("step"):
                if rank == 1:
                    with phases.enter("reward"):
                        user_reward(store)
                else:
                    with phases.enter("update_actor"):
                        dist.all_reduce(torch.zeros(1), group=impatient)
    except HangError as hang:
        error = str(hang)
        store.set("over", "1")
    watcher.close()
    return error, logged


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_a_hung_rank_is_named_and_all_stacks_are_written(
    lazy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)  # ranks connect when they first meet
    (error, logged), (no_error, logged_too) = run_ranks(2, _in_ranks, str(tmp_path))
    (directory,) = (tmp_path / "hangs").iterdir()  # one, though the stall was seen before
    assert no_error == ""

    pattern = (
        r"rank 0 waited 1 s in update_actor for rank 1, which is in reward since \d+ s "
        r"\(tests/faults/test_hang.py:\d+ in user_reward\); stacks of all ranks: "
    )
    assert re.fullmatch(pattern + re.escape(str(directory)), error), error
    warnings = [line for line in logged + logged_too if line.startswith("no progress: ")]
    assert warnings and all(str(directory) in line for line in warnings)

    waiting = (directory / "rank_0.txt").read_text()
    hung = (directory / "rank_1.txt").read_text()
    assert "rank 0, in update_actor for" in waiting.splitlines()[0]
    assert "waiting for other ranks" in waiting.splitlines()[0]
    assert "all_reduce" in waiting
    assert "rank 1, in reward for" in hung.splitlines()[0]
    assert "user_reward" in hung
