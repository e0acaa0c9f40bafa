"""The view on a terminal: what it shows, and that log lines stay whole above it."""

import io
import logging
import os
import pty
import sys
import threading
from contextlib import suppress

import pytest
from rich.console import Console

from mrlhf.log import configure_logging
from mrlhf.metrics import CurrentPhase
from mrlhf.run.alarms.watch import Alarm
from mrlhf.run.board import Board, ShownSample
from mrlhf.run.view import picture
from mrlhf.terminal import Count, Curve, Picture, TerminalView, arrow, is_terminal, render, trend

ALARM = Alarm(3, "truncation", "warning", "40% are cut off", "long", "data.x", "docs")


def shown(picture, width=80, height=40):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(render(picture))
    return console.file.getvalue()


def board():
    phase = CurrentPhase()
    board = Board(
        phase=phase,
        state="training",
        step=12,
        steps=50,
        seconds_left=61.6,
        curves=[Curve("reward", [0.0, 0.25, 1.0]), Curve("length", [4.0, 3.5])],
        alarms=[ALARM],
        sample=ShownSample("training", "training step 12", "  prompt '1+1='\n  [bold]2[/bold]"),
    )
    phase.name = "gen"
    phase.advance(120, 256, "responses")
    return board


def test_phase_progress_metrics_with_trend_alarms_and_a_sample(tmp_path):
    text = shown(picture(board(), tmp_path / "run"), width=120)
    assert str(tmp_path / "run")[:60] in text
    for line in (
        "12/50 steps",
        "0:01:02 left",
        "generating",
        "120/256 responses",
        "truncation: 40% are cut off",
        "training step 12",
        "[bold]2[/bold]",
    ):
        assert line in text, text
    reward = next(line for line in text.splitlines() if "reward" in line)
    assert reward.split()[1:5] == ["reward", "1", "↑", "▁▃█"]
    assert "↓" in next(line for line in text.splitlines() if "length" in line)


def test_before_the_first_step_there_is_only_the_phase():
    text = shown(picture(Board(), "runs/my"))
    assert "start" in text and "steps" not in text and len(text.splitlines()) == 3


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal(width):
    wide = Picture(
        "a long name of a run " * 9, Count(1, 2, "steps"), 5.0, "generating", 1.0, None,
        [Curve("reward", [1.0] * 99)], ["alarm " * 40] * 9, "sample", "text " * 99 + "\nx" * 99,
    )  # fmt: skip
    lines = shown(wide, width).splitlines()
    assert max(map(len, lines)) == width
    assert sum("alarm" in line for line in lines) == 4 and len(lines) < 20


def test_trends():
    assert trend([1.0, 1.0]) == "▁▁" and trend([0.0, 7.0, 3.0]) == "▁█▄"
    assert len(trend(list(range(100)))) == 24
    assert [arrow([1.0]), arrow([1.0, 1.0]), arrow([2.0, 1.0]), arrow([1.0, 2.0])] == list("→→↓↑")


def _read_all(main, drawn):
    """Read what is drawn on a terminal until its other end is closed."""
    with suppress(OSError):
        while part := os.read(main, 4096):
            drawn.append(part)
    os.close(main)


def test_only_a_real_terminal_gets_a_view(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert not is_terminal(io.StringIO())
    main, end = pty.openpty()
    with os.fdopen(end, "w") as terminal, os.fdopen(main, "rb"):
        assert is_terminal(terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert not is_terminal(terminal)


def test_log_lines_stand_whole_above_the_view_and_the_cursor_stays(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    main, end = pty.openpty()
    drawn = []
    reader = threading.Thread(target=_read_all, args=(main, drawn))
    reader.start()
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    with os.fdopen(end, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        configure_logging(0)
        view = TerminalView()
        view.open()
        view.draw(picture(board(), "runs/my"))
        logging.getLogger("mrlhf.trainers").warning("slow disk")
        view.draw(picture(board(), "runs/my"))
        view.close()
    reader.join()
    text = b"".join(drawn).decode()
    root.handlers[:], root.level = before

    line = "WARNING mrlhf.trainers: slow disk"
    assert line in text
    first, second = text.index("12/50 steps"), text.rindex("12/50 steps")
    assert first < text.index(line) < second
    assert "\x1b[2K" in text[second:]  # at the end the view is wiped off
    hidden, visible = text.find("\x1b[?25l"), text.find("\x1b[?25h")
    assert hidden < visible < first
