"""Turns the board of a run into pictures on the terminal.

It knows phases by name, and not how a picture is drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import MappingProxyType

from mrlhf.log import Console
from mrlhf.run.board import Board
from mrlhf.terminal import Count, Picture, TerminalView, is_terminal

_PHASES = MappingProxyType(
    {
        "reshard": "handing over weights",
        "gen": "generating",
        "reward": "scoring",
        "old_log_prob": "evaluating the policy",
        "ref": "evaluating the reference",
        "values": "evaluating the critic",
        "adv": "computing advantages",
        "update_critic": "updating the critic",
        "update_actor": "updating the policy",
        "step": "training",
        "testing": "validating",
        "save_checkpoint": "saving a checkpoint",
        "export": "writing the model",
    }
)


def is_drawn(console: Console) -> bool:
    """Whether `trainer.console` asks for a view, and standard error can show one."""
    return console in ("auto", "view") and is_terminal(sys.stderr)


def console_of_log(console: Console) -> Console:
    """The setting for the log: quiet if a view is to stand alone."""
    return "quiet" if console == "view" and is_drawn(console) else console


class View:
    """The board of one run on the terminal."""

    def __init__(self, board: Board, output_dir: Path) -> None:
        self._board = board
        self._output_dir = output_dir
        self._terminal = TerminalView()

    def show(self) -> None:
        """Draw the board."""
        self._terminal.draw(picture(self._board, self._output_dir))

    def close(self) -> None:
        """Remove the view from the terminal."""
        self._terminal.close()


def picture(board: Board, output_dir: Path) -> Picture:
    """The picture of the board."""
    phases = board.phases
    progress = phases.progress
    sample = board.sample
    return Picture(
        title=str(output_dir),
        steps=None if board.steps is None else Count(board.step, board.steps, "steps"),
        seconds_left=board.seconds_left,
        phase=_PHASES.get(phases.name, phases.name),
        phase_seconds=phases.seconds,
        progress=None if progress is None else Count(progress.done, progress.of, progress.unit),
        curves=board.curves,
        alarms=[f"{alarm.name}: {alarm.message}" for alarm in board.alarms],
        sample_title="" if sample is None else sample.title,
        sample="" if sample is None else sample.text,
    )
