"""The view on a terminal: what it shows, and that log lines stay whole above it."""

import io
import os
import pty
import re
from dataclasses import replace

import pytest
from rich.console import Console

from mrlhf.parallel.phases import Phases
from mrlhf.run.alarms.watch import Alarm
from mrlhf.run.board import Board, ShownSample
from mrlhf.run.terminal import LinesAboveView, TerminalView, arrow, is_terminal, render, trend

ALARM = Alarm(3, "truncation", "warning", "40% are cut off", "long", "data.x", "docs")


def shown(board, title="runs/my", width=80, height=40):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(render(board, title))
    return console.file.getvalue()


def board():
    phases = Phases()
    board = Board(
        phases=phases,
        state="training",
        step=12,
        steps=50,
        seconds_left=61.6,
        curves={"reward": [0.0, 0.25, 1.0], "length": [4.0, 3.5]},
        alarms=[ALARM],
        sample=ShownSample("training", "training step 12", "  prompt '1+1='\n  [bold]2[/bold]"),
    )
    phases.name = "gen"
    phases.advance(120, 256, "responses")
    phases.memory.hold("actor/params", 5 * 2**20)
    phases.memory.hold("engine/cache", 2**31)

    return board


def test_phase_progress_metrics_with_trend_alarms_and_a_sample(tmp_path):
    text = shown(board(), str(tmp_path / "run"), width=120)
    assert str(tmp_path / "run")[:60] in text

    for line in (
        "12/50 steps",
        "0:01:02 left",
        "generating",
        "120/256 responses",
        "memory 2.153 GB: engine/cache 2.147 GB, actor/params 5.243 MB",
        "truncation: 40% are cut off",
        "training step 12",
        "[bold]2[/bold]",
    ):
        assert line in text, text
    reward = next(line for line in text.splitlines() if "reward" in line)
    assert reward.split()[1:5] == ["reward", "1", "↑", "▁▃█"]
    assert "↓" in next(line for line in text.splitlines() if "length" in line)


def test_before_the_first_step_there_is_only_the_phase():
    text = shown(Board())
    assert "start" in text and "steps" not in text and len(text.splitlines()) == 3


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal(width):
    wide = Board(
        step=1,
        steps=2,
        seconds_left=5.0,
        curves={"reward": [1.0] * 99},
        alarms=[replace(ALARM, message="alarm " * 40)] * 9,
        sample=ShownSample("training", "sample", "text " * 99 + "\nx" * 99),
    )
    lines = shown(wide, "a long name of a run " * 9, width).splitlines()
    assert max(map(len, lines)) == width
    assert sum("alarm" in line for line in lines) == 4 and len(lines) < 20


def test_trends():
    assert trend([1.0, 1.0]) == "▁▁" and trend([0.0, 7.0, 3.0]) == "▁█▄"
    assert len(trend(list(range(100)))) == 24
    assert [arrow([1.0]), arrow([1.0, 1.0]), arrow([2.0, 1.0]), arrow([1.0, 2.0])] == list("→→↓↑")


def test_only_a_real_terminal_gets_a_view(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert not is_terminal(io.StringIO())
    main, end = pty.openpty()
    with os.fdopen(end, "w") as terminal, os.fdopen(main, "rb"):
        assert is_terminal(terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert not is_terminal(terminal)


def screen(text):
    """What a terminal shows after this text: a line for each row, without colours."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":  # as a terminal driver passes it on: to the start of the next row
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        elif part == "\x1b[J":
            rows[row:] = [rows[row][:column]]
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif not part.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
            column += len(part)
        else:
            assert part.endswith("m"), f"unknown to this terminal: {part!r}"

    return [line.rstrip() for line in rows]


def test_lines_of_every_rank_stand_whole_above_the_view(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    view = TerminalView("runs/my", terminal)
    lines = {rank: LinesAboveView(terminal) for rank in (0, 3)}

    lines[0].write("step 1\n")
    view.draw(board())
    drawn = screen(terminal.getvalue())
    height = len(drawn) - 1
    assert "12/50 steps" in "\n".join(drawn) and height > 5

    lines[3].write("WARNING slow")  # no line yet
    view.draw(board())
    lines[3].write(" disk\nTraceback\n")
    lines[0].write("step 2\n")
    view.draw(board())
    shown = screen(terminal.getvalue())
    assert shown[:4] == ["step 1", "WARNING slow disk", "Traceback", "step 2"]
    assert shown[4:] == drawn[1:]  # one view, whole, with nothing stale

    view.close()
    lines[3].write("error: over\n")
    end = ["step 1", "WARNING slow disk", "Traceback", "step 2", "error: over", ""]
    assert screen(terminal.getvalue()) == end


def test_control_characters_of_a_sample_or_a_name_do_not_reach_the_terminal():
    red = "\x1b[31m"
    sample = ShownSample("training", f"title {red}", f"text {red}")
    drawn = shown(Board(alarms=[replace(ALARM, message=red)], sample=sample), red)
    assert "\x1b" not in drawn
    assert drawn.count("\\x1b[31m") == 4
