"""Draws on a terminal: the view of a run below the log lines, and bars for long file tasks.

This file does not know what a run or a metric is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mrlhf.printable import printable

_CLEAR_BELOW = "\r\x1b[J"
_BARS = "▁▂▃▄▅▆▇█"
_TREND_POINTS = 24
_BAR_WIDTH = 24
_MOST_ALARMS = 4
_SAMPLE_LINES = 6


@dataclass(frozen=True)
class Curve:
    """One metric: its name in words, and its latest values, at least one, the present one last."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True)
class Count:
    """Progress in steps or in a phase: `done` out of `of`, and the unit in the plural."""

    done: int
    of: int
    unit: str


@dataclass(frozen=True)
class Picture:
    """The contents of the view."""

    title: str
    steps: Count | None
    seconds_left: float | None  # until the last step is complete; None if that is not known
    phase: str
    phase_seconds: float  # time since the phase began
    progress: Count | None  # within the phase; None if that is not known
    curves: Sequence[Curve]
    alarms: Sequence[str]  # the alarms that are on, one line each
    sample_title: str  # empty if there is no sample
    sample: str


def is_terminal(stream: TextIO) -> bool:
    """Whether a view can be drawn on the stream."""
    console = Console(file=stream)
    return stream.isatty() and console.is_terminal and not console.is_dumb_terminal


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

    def __init__(self, stream: TextIO | None = None) -> None:
        """Draw nothing yet; `stream` is a terminal, standard error by default."""
        self._console = Console(file=sys.stderr if stream is None else stream)

    def draw(self, picture: Picture) -> None:
        """Replace the picture on the terminal."""
        with self._console.capture() as drawn:
            self._console.print(render(picture))
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


class ByteBars:
    """A bar for each task that reads or writes bytes; nothing if standard error is no terminal."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self._progress = Progress(
            *columns,
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not sys.stderr.isatty(),
        )

    def start(self, task: str, nbytes: int) -> Callable[[int], None]:
        """Begin a task of `nbytes` bytes; call the result with each number of bytes done."""
        number = self._progress.add_task(task, total=nbytes)
        return lambda done: self._progress.advance(number, done)

    def __enter__(self) -> ByteBars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def render(picture: Picture) -> RenderableType:
    """The picture, as rich draws it."""
    parts: list[RenderableType] = [_progress(picture)]
    if picture.curves:
        parts.append(_curves(picture.curves))
    for line in picture.alarms[-_MOST_ALARMS:]:
        parts.append(Text(printable(line), style="bold red", overflow="ellipsis", no_wrap=True))

    if picture.sample_title:
        lines = picture.sample.splitlines()[:_SAMPLE_LINES]
        text = Text(printable("\n".join(lines)), overflow="ellipsis", no_wrap=True)
        parts.append(Panel(text, title=Text(printable(picture.sample_title)), title_align="left"))
    return Panel(Group(*parts), title=Text(printable(picture.title)), title_align="left")


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


def _progress(picture: Picture) -> Table:
    """The lines with the training steps and the present phase."""
    table = Table.grid(padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)

    if picture.steps is not None:
        left = ""
        if picture.seconds_left is not None:
            left = f"{timedelta(seconds=round(picture.seconds_left))} left"
        table.add_row(Text("training"), _bar(picture.steps), Text(_words(picture.steps)), left)

    seconds = f"{picture.phase_seconds:.0f} s"
    if picture.progress is None:
        table.add_row(Text(picture.phase), "", "", seconds)
    else:
        progress = picture.progress
        table.add_row(Text(picture.phase), _bar(progress), Text(_words(progress)), seconds)
    return table


def _curves(curves: Sequence[Curve]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="cyan")
    for curve in curves:
        value = f"{curve.values[-1]:.4g}"
        table.add_row(Text(curve.label), value, arrow(curve.values), trend(curve.values))
    return table


def _bar(count: Count) -> ProgressBar:
    return ProgressBar(total=max(count.of, 1), completed=count.done, width=_BAR_WIDTH)


def _words(count: Count) -> str:
    return f"{count.done}/{count.of} {count.unit}"
