"""The line that says which ranks are missing, and which errors are time-outs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from mrlhf.errors import TrainingError
from mrlhf.parallel.phases import Phases
from mrlhf.run import watcher as watcher_module
from mrlhf.run.hangs import Answer, HangReport, HangReports, describe, is_time_out
from mrlhf.run.watcher import Watcher

WAITING = Answer("update_actor", 600.4, waits=True, where="roles/actor.py:120 in update")
BUSY = Answer("reward", 612.0, waits=False, where="my/rewards.py:7 in score")
BEHIND = Answer("values", 601.0, waits=True, where="roles/critic.py:50 in values")
END = "; stacks of all ranks: out/hangs/now"


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ([WAITING, BUSY], "rank 2, which is in reward since 612 s (my/rewards.py:7 in score)"),
        ([None, WAITING], "rank 1, which gives no answer"),
        ([BEHIND, WAITING], "rank 1, which is in values since 601 s"),
        ([BEHIND, None], "rank 2, which gives no answer"),
        (
            [None, BUSY],
            "rank 1, which gives no answer and for rank 2, which is in reward since 612 s "
            "(my/rewards.py:7 in score)",
        ),
        ([WAITING, WAITING], "other ranks, which all wait in the same phase"),
        (
            [None] * 5,
            "rank 1, which gives no answer and for rank 2, which gives no answer and for rank 3, "
            "which gives no answer and for 2 more",
        ),
    ],
)
def test_the_missing_ranks_are_named(others: list[Answer | None], wanted: str) -> None:
    report = HangReport(dict(enumerate([WAITING, *others])), Path("out/hangs/now"))
    line = describe(0, 600.0, report)
    assert line == f"rank 0 waited 600 s in update_actor for {wanted}{END}"


def test_time_outs_are_told_from_other_errors() -> None:
    gloo = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation"
    assert is_time_out(RuntimeError(gloo))
    late = "[gloo/transport/tcp/pair.h:311] Connect timeout [none]"  # if groups connect late
    assert is_time_out(RuntimeError(late))
    assert not is_time_out(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
    assert not is_time_out(TrainingError("5 gradients in a row were not usable"))
    assert not is_time_out(None)


class _Number:
    """A number that its GPU has not computed yet."""

    def __init__(self) -> None:
        computed = threading.Lock()
        computed.acquire()
        self.compute = computed.release
        self.item: Callable[[], bool] = computed.acquire  # written in C, as torch's method


def _answer_while_asking(directory: Path, score: FunctionType) -> Answer | None:
    """What a rank answers while its main thread is in `score`."""
    number = _Number()
    reports = HangReports(HashStore(), 0, 1, directory, Phases())
    answers = []

    main = threading.get_ident()

    def watch() -> None:
        while sys._current_frames()[main].f_code is not score.__code__:
            time.sleep(0.01)
        answers.append(reports.report(since=0.0).answers[0])
        number.compute()

    watcher = threading.Thread(target=watch)
    watcher.start()
    score(number)
    watcher.join()
    return answers[0]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_rank_that_asks_its_gpu_for_a_number_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    answer = _answer_while_asking(tmp_path, lambda number: number.item())
    assert answer is not None and "test_hangs.py" in answer.where
    assert answer.waits == has_gpu


def test_a_rank_that_scores_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def score(number: _Number) -> bool:
        rule = number.item
        return rule()

    answer = _answer_while_asking(tmp_path, score)
    assert answer is not None and not answer.waits


def test_stacks_that_cannot_be_written_are_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    reports = HangReports(HashStore(), 0, 1, file / "hangs", Phases())
    answer = reports.report(since=0.0).answers[0]
    assert answer is not None and answer.phase == "start"


class _Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def test_a_wait_that_goes_on_is_reported_each_hour(
    tmp_path: Path, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = Watcher(HashStore(), 0, 1, tmp_path, 600.0, Phases())
    reports = []
    for minute in range(1, 190):
        clock.sleep(60.0)
        watcher._look_for_a_stall()
        if caplog.messages:
            reports.append(minute)
            assert "other ranks" in caplog.messages[0]
            caplog.clear()
    assert reports == [11, 72, 133]  # the first look counts as progress


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_never_answers_ends_the_job(
    is_late: bool, tmp_path: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers late, since it writes files, does not."""
    left: list[str] = []
    monkeypatch.setattr(watcher_module, "leave", lambda code, why: left.append(why))
    phases = Phases()
    store = HashStore()
    watcher = Watcher(store, 0, 2, tmp_path, 600.0, phases)
    other = HangReports(PrefixStore("hang", store), 1, 2, tmp_path, phases)

    def wait(minutes: int) -> None:
        for _ in range(minutes):
            clock.sleep(60.0)
            watcher._look_for_a_stall()
            if is_late:
                other.look()

    wait(15)  # it is asked once
    phases.advance(1, 2, "responses")
    with phases.enter("step"):
        wait(15)  # and once more after this rank has gone on
        assert left == []
        wait(10)
    if is_late:
        assert left == []
    else:
        assert len(left) == 1 and "for rank 1, which gives no answer" in left[0]
