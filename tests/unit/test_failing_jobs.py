"""What is said about an error, with which exit code, and who says it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from mrlhf.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HangError,
    MethodError,
    MrlhfError,
    RewardError,
    TrainingError,
    UserTraceback,
    WeightError,
)
from mrlhf.run import failures
from mrlhf.run.failures import STOP_SIGNALS, Failure, Failures, explain


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A rank that has told why it fails ignores signals from then on; pytest must not."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "at_start", "later"),
    [
        (ConfigError("no"), 2, 2),
        (DataError("no"), 2, 2),
        (WeightError("no"), 2, 1),
        (RewardError("no"), 2, 1),
        (MethodError("no"), 2, 1),
        (CheckpointError("no"), 2, 1),
        (TrainingError("no"), 2, 1),
        (HangError("no"), 1, 1),
    ],
)
def test_the_exit_code_says_whether_starting_again_may_help(
    error: MrlhfError, at_start: int, later: int
) -> None:
    assert explain(error, rank=1, at_start=True).code == at_start
    assert explain(error, rank=1, at_start=False).code == later
    assert explain(error, rank=1, at_start=True).text == f"{type(error).__name__}: no"


@pytest.mark.parametrize(
    ("error", "text", "is_cause"),
    [
        (
            RuntimeError("[/pytorch/pair.cc:534] Connection closed by peer [127.0.0.1]:1\nframes"),
            "rank 3 lost its connection to another rank, which has ended without saying why "
            "([/pytorch/pair.cc:534] Connection closed by peer [127.0.0.1]:1)",
            False,
        ),
        (
            RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1ms for recv operation\nframes"),
            "HangError: rank 3 waited longer than distributed.timeout_s for another rank; if none "
            "is missing, raise the key ([unbound_buffer.cc:78] Timed out waiting 1ms for recv "
            "operation)",
            True,
        ),
        (
            MethodError("f of m.py raised RuntimeError: Connection closed by peer [127.0.0.1]:1"),
            "rank 3 lost its connection to another rank, which has ended without saying why "
            "(f of m.py raised RuntimeError: Connection closed by peer [127.0.0.1]:1)",
            False,
        ),
    ],
)
def test_what_torch_says_of_other_ranks_is_one_line(
    error: RuntimeError, text: str, is_cause: bool
) -> None:
    failure = explain(error, rank=3, at_start=True)
    assert (failure.code, failure.text, failure.is_cause) == (1, text, is_cause)


@pytest.mark.parametrize("kind", [RewardError, MethodError])
def test_the_traceback_of_users_code_follows_the_line_but_not_in_the_summary(
    kind: type[MrlhfError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind("it raised")
    error.__cause__ = UserTraceback("Traceback:\n  in f\n")
    own = explain(error, 0, at_start=False)
    said: list[str] = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    Failures(HashStore(), 0, 1).report(own, said.append)

    line = f"{kind.__name__}: it raised"
    assert said == [f"{line}\nTraceback:\n  in f"]
    message = json.loads((tmp_path / "0.json").read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == line


def test_the_summary_of_our_own_bug_is_one_line() -> None:
    try:
        raise KeyError("gone")
    except KeyError as error:
        failure = explain(error, 0, at_start=False)
    assert failure.text == "this rank failed with KeyError: 'gone'"
    assert failure.whole.startswith(f"{failure.text}\nTraceback (most recent call last):\n")
    assert failure.whole.endswith("\nKeyError: 'gone'")


def test_the_first_to_ask_speaks_and_all_leave_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    first = Failures(store, 0, 2)
    second = Failures(store, 1, 2)
    said: list[str] = []
    store.set("rank 1 has heard", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0.json"))
    own = Failure(0, 2, "the cause", moment=7.5)
    assert first.report(own, said.append) == own
    assert second.another_reports() and not first.another_reports()
    assert first.look() is None

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1.json"))
    heard = second.report(Failure(1, 1, "what follows from it", time.time()), said.append)
    assert heard == own
    assert said == ["the cause"]
    for file in tmp_path.iterdir():
        message = json.loads(file.read_text())["message"]
        assert message["message"] == message["extraInfo"]["py_callstack"] == "the cause"
        assert message["extraInfo"]["timestamp"] == "7"


def test_another_rank_speaks_for_one_that_was_killed_before_it_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "_REPORT_WAIT_S", 0.05)
    monkeypatch.setattr(failures, "_READ_WAIT_S", 0.05)
    store = HashStore()
    assert Failures(store, 0, 3).claim_turn(0)
    said: list[str] = []
    Failures(store, 1, 3).report(Failure(1, 2, "mine", 1.0), said.append)
    Failures(store, 2, 3).report(Failure(2, 2, "another", 1.0), said.append)
    assert said == ["mine"]


def test_a_rank_without_a_store_speaks_for_itself() -> None:
    class Gone(HashStore):
        def compare_set(self, *args: str) -> bytes:
            raise RuntimeError("Connection reset by peer")

        def set(self, *args: str) -> None:
            raise RuntimeError("Connection reset by peer")

    said: list[str] = []
    Failures(Gone(), 1, 2).report(Failure(1, 2, "mine", 1.0), said.append)
    assert said == ["mine"]
