"""Draws on a terminal: the board of a run below the log lines, and bars for long file tasks.

It knows phases by name, and no metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mrlhf.log import Console, in_digits
from mrlhf.parallel.device_memory import in_words
from mrlhf.parallel.phases import PhaseProgress
from mrlhf.printable import printable, size_text
from mrlhf.run.board import Board

_CLEAR_BELOW = "\r\x1b[J"
_BARS = "▁▂▃▄▅▆▇█"
_TREND_POINTS = 24
_BAR_WIDTH = 24
_MOST_ALARMS = 4
_SAMPLE_LINES = 6
PHASES = MappingProxyType(
    {
        "start": "starting",
        "reshard": "handing over weights",
        "gen": "generating",
        "reward": "scoring",
        "old_log_prob": "log-probs of the policy",
        "ref": "log-probs of the reference",
        "values": "values of the critic",
        "adv": "computing advantages",
        "update_critic": "updating the critic",
        "update_actor": "updating the policy",
        "step": "training",
        "testing": "validating",
        "dump": "writing rollouts down",
        "save_checkpoint": "saving a checkpoint",
        "export": "writing the model",
    }
)


def is_terminal(stream: TextIO) -> bool:
    """Whether a view can be drawn on the stream."""
    console = RichConsole(file=stream)
    return stream.isatty() and console.is_terminal and not console.is_dumb_terminal


def is_drawn(console: Console) -> bool:
    """Whether `trainer.console` asks for a view, and standard error can show one."""
    return console in ("auto", "view") and is_terminal(sys.stderr)


def console_of_log(console: Console) -> Console:
    """The setting for the log: quiet if a view is to stand alone."""
    return "quiet" if console == "view" and is_drawn(console) else console


class LinesAboveView:
    """Standard error of a process on whose terminal this or another process draws a view.

    Between two drawings the cursor rests at the upper left corner of the view. A line clears the
    terminal below the cursor and takes the place of the view, which is next drawn below it.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`, a terminal, in whole lines."""
        self._stream = stream
        self._unfinished = ""

    def write(self, text: str) -> int:
        """Write all complete lines; the rest waits for its end."""
        lines, end, self._unfinished = (self._unfinished + text).rpartition("\n")
        if end:
            self._stream.write(_CLEAR_BELOW + lines + end)
            self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class TerminalView:
    """The lowest lines of a terminal; log lines scroll by above them, see `LinesAboveView`."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        """Draw nothing yet; `stream` is a terminal, standard error by default."""
        self._title = title
        self._console = RichConsole(file=sys.stderr if stream is None else stream)

    def draw(self, board: Board) -> None:
        """Replace what the terminal shows of the board."""
        with self._console.capture() as drawn:
            self._console.print(render(board, self._title))
        lines = drawn.get().splitlines()[: max(self._console.height - 1, 1)]
        back = f"\x1b[{len(lines) - 1}A\r" if len(lines) > 1 else "\r"
        self._write("\n".join(lines) + back)

    def close(self) -> None:
        """Remove the view from the terminal."""
        self._write("")

    def _write(self, text: str) -> None:
        """Replace the view by `text` in one write, so that no other line comes between."""
        self._console.file.write(_CLEAR_BELOW + text)
        self._console.file.flush()


class ByteBars(Progress):
    """A bar for each task that reads or writes bytes; nothing if standard error is no terminal."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        super().__init__(
            *columns,
            TimeRemainingColumn(),
            console=RichConsole(file=sys.stderr),
            disable=not sys.stderr.isatty(),
        )

    def begin(self, task: str, nbytes: int) -> Callable[[int], None]:
        """Begin a task of `nbytes` bytes; call the result with each number of bytes done."""
        number = self.add_task(task, total=nbytes)
        return lambda done: self.advance(number, done)


def render(board: Board, title: str) -> RenderableType:
    """The board, as rich draws it."""
    parts: list[RenderableType] = [_progress(board)]
    held = board.phases.memory.held
    if held:
        memory = f"memory {size_text(sum(held.values()))}: {in_words(held)}"
        parts.append(Text(memory, overflow="ellipsis", no_wrap=True))
    if board.curves:
        parts.append(_curves(board.curves))
    for alarm in board.alarms[-_MOST_ALARMS:]:
        line = printable(f"{alarm.name}: {alarm.message}")
        parts.append(Text(line, style="bold red", overflow="ellipsis", no_wrap=True))

    if board.sample is not None:
        lines = board.sample.text.splitlines()[:_SAMPLE_LINES]
        text = Text(printable("\n".join(lines)), overflow="ellipsis", no_wrap=True)
        parts.append(Panel(text, title=Text(printable(board.sample.title)), title_align="left"))
    return Panel(Group(*parts), title=Text(printable(title)), title_align="left")


def trend(values: Sequence[float]) -> str:
    """The latest values as a row of bars, scaled from the lowest to the highest of them."""
    shown = values[-_TREND_POINTS:]
    low = min(shown)
    spread = max(shown) - low
    if spread == 0:
        return _BARS[0] * len(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / spread * top)] for value in shown)


def arrow(values: Sequence[float]) -> str:
    """An arrow that shows whether the value has risen, fallen or stayed since the one before."""
    if len(values) < 2 or values[-1] == values[-2]:
        return "→"
    return "↑" if values[-1] > values[-2] else "↓"


def _progress(board: Board) -> Table:
    """The lines with the training steps and the present phase."""
    table = Table.grid(padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)

    if board.steps is not None:
        steps = PhaseProgress(board.step, board.steps, "steps")
        left = ""
        if board.seconds_left is not None:
            left = f"{timedelta(seconds=round(board.seconds_left))} left"
        table.add_row(Text("training"), *_bar(steps), left)

    phases = board.phases
    progress = phases.progress
    bar = ("", "") if progress is None else _bar(progress)
    name = Text(PHASES.get(phases.name, phases.name))
    table.add_row(name, *bar, f"{phases.seconds:.0f} s")
    return table


def _curves(curves: Mapping[str, Sequence[float]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="cyan")
    for label, values in curves.items():
        table.add_row(Text(label), in_digits(values[-1]), arrow(values), trend(values))
    return table


def _bar(count: PhaseProgress) -> tuple[ProgressBar, Text]:
    """A bar, and the same in words."""
    bar = ProgressBar(total=max(count.of, 1), completed=count.done, width=_BAR_WIDTH)
    return bar, Text(f"{count.done}/{count.of} {count.unit}")
