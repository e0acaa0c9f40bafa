"""`status.json` says where a run stands, is always whole, and is kept fresh by a thread."""

import json
import os
import time

import pytest

from mrlhf.run import board as board_file
from mrlhf.run.alarms.watch import Alarm
from mrlhf.run.board import Board, Monitor

ALARM = Alarm(3, "truncation", "warning", "40% are cut off", "long", "data.x", "docs")


def read(directory):
    return json.loads((directory / "status.json").read_text(encoding="utf-8"))


def until(holds):
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_everything_that_stands_on_the_board_is_written(tmp_path):
    board = Board(
        state="training",
        step=3,
        steps=10,
        seconds_left=12.4,
        metrics={"x": 0.5, "y": float("nan")},
        alarms=[ALARM],
    )
    board.phases.advance(2, 8, "mini-batches")
    Monitor(board, tmp_path, world_size=4).begin()
    status = read(tmp_path)
    fixed = {
        "version": 1,
        "state": "training",
        "message": "",
        "step": 3,
        "of": 10,
        "phase": "start",
        "progress": {"done": 2, "of": 8, "unit": "mini-batches"},
        "eta_seconds": 12,
        "metrics": {"x": 0.5, "y": None},
        "pid": os.getpid(),
        "ranks": 4,
    }

    assert {name: status[name] for name in fixed} == fixed
    assert status["alarms"][0]["name"] == "truncation"
    assert set(status) - set(fixed) == {"phase_seconds", "alarms", "began", "updated", "host"}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_phases_and_the_end_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(board_file, "_LOOK_S", 0.01)
    monkeypatch.setattr(board_file, "_WRITE_S", 0.02)
    board = Board()
    monitor = Monitor(board, tmp_path, 1)
    monitor.start()
    monitor.begin()
    assert read(tmp_path)["state"] == "starting"

    board.state = "training"
    with board.phases.enter("gen"):
        until(lambda: read(tmp_path)["phase"] == "gen")
        board.phases.advance(1, 4, "responses")
        until(lambda: read(tmp_path)["progress"] == {"done": 1, "of": 4, "unit": "responses"})
    monitor.close_view()
    monitor.end("failed", "the disk is full")
    status = read(tmp_path)
    assert (status["state"], status["message"]) == ("failed", "the disk is full")
    board.step = 9
    time.sleep(0.05)
    assert read(tmp_path) == status


def test_the_status_is_written_at_most_once_a_second_but_for_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(board_file, "_LOOK_S", 0.01)
    monkeypatch.setattr(board_file, "_WRITE_S", 3600)
    board = Board()
    monitor = Monitor(board, tmp_path, 1)
    monitor.start()
    monitor.begin()
    with board.phases.enter("gen"):
        time.sleep(0.05)
        assert read(tmp_path)["phase"] == "start"
        monitor.write()
        assert read(tmp_path)["phase"] == "gen"
    monitor.close_view()


def test_a_status_that_cannot_be_written_is_said_once(tmp_path, caplog):
    monitor = Monitor(Board(), tmp_path / "missing", 1)
    monitor.begin()
    for _ in range(2):
        monitor.write()
    (line,) = caplog.messages
    assert line.startswith("cannot write the status of the run")
    (tmp_path / "missing").mkdir()
    monitor.write()
    assert read(tmp_path / "missing")["state"] == "starting"


def test_nothing_is_written_of_a_run_that_has_not_begun(tmp_path):
    monitor = Monitor(Board(), tmp_path, 1)
    monitor.close_view()
    monitor.end("failed", "no such model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_monitor_that_never_started_can_end(tmp_path, state):
    monitor = Monitor(Board(), tmp_path, 1)
    monitor.begin()
    monitor.close_view()
    monitor.end(state)
    assert read(tmp_path)["state"] == state
