"""Processes that start again on the same store do not meet the keys of their last attempt."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest
import torch.distributed as dist

from mrlhf.errors import ConfigError, HangError
from mrlhf.parallel.job import Launch, _name_attempt, connect

WORLD_SIZE = 4


def names_of_attempt(store: dist.Store, order: list[int]) -> list[str]:
    """The name that each rank finds; the ranks come in this order, a moment apart."""
    names = [""] * WORLD_SIZE

    def find(rank: int) -> None:
        launch = Launch(rank, WORLD_SIZE, rank)
        names[rank] = _name_attempt(store, launch, timeout_s=600.0, look=None)

    threads = [threading.Thread(target=find, args=[rank]) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(0.03)
    for thread in threads:
        thread.join()
    return names


def test_all_ranks_find_one_new_name_in_each_attempt() -> None:
    store = dist.HashStore()
    orders = random.Random(0)
    seen = set()
    for _ in range(5):
        order = orders.sample(range(WORLD_SIZE), WORLD_SIZE)
        names = set(names_of_attempt(store, order))
        assert len(names) == 1, order
        assert not names & seen
        seen |= names


def test_a_process_that_never_comes_is_an_error() -> None:
    with pytest.raises(HangError, match=r"rank 0 waited 0.1 s in vain for all 2 processes"):
        _name_attempt(dist.HashStore(), Launch(0, 2, 0), timeout_s=0.1, look=None)


def test_a_store_that_never_answers_or_that_is_another_program_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(silent.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

        with pytest.raises(HangError, match=r"rank 1 does not reach .* within 0\.2 s"):
            connect(0.2)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigError, match="is in use; give torchrun another --master-port"):
            connect(60.0)
