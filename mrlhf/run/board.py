"""The present state of a run, and what shows it: `status.json`, a terminal, and `timeline/`.

This file does not know the meaning of what it shows.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from mrlhf.checkpoint.output_files import STATUS, TIMELINE
from mrlhf.log import json_number
from mrlhf.parallel.phases import Phases, Span
from mrlhf.run.alarms.watch import Alarm

logger = logging.getLogger(__name__)

State = Literal["starting", "training", "finished", "interrupted", "failed"]

_VERSION = 1  # of status.json, which docs/operations.md describes
_LOOK_S = 0.25
_WRITE_S = 1.0  # from one writing of the status to the next, at least
_ALIVE_S = 10.0  # and at most, so that a reader can tell whether the run is alive


@dataclass(frozen=True)
class ShownSample:
    """A response that people are shown: prompt, response and score in words."""

    kind: str  # "training" or "held-out"
    title: str  # for example "training step 10"
    text: str


@dataclass
class Board:
    """The present state of a run.

    The main thread writes and another thread reads, so each attribute is replaced as a whole.
    """

    # The present phase of this rank, and its progress.
    phases: Phases = field(default_factory=Phases)
    has_view: bool = False  # whether a view on the terminal shows the board
    state: State = "starting"
    message: str = ""  # why the run was interrupted or has failed
    step: int = 0  # the last training step that is complete
    steps: int | None = None  # training steps of the whole run; None while that is not known
    seconds_left: float | None = None  # estimated time until the last step is complete
    metrics: Mapping[str, float] = field(default_factory=dict)  # those of the last complete step
    # The metrics that people are shown, by label, over the latest steps; at least one value each.
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    alarms: Sequence[Alarm] = ()  # those that are on
    sample: ShownSample | None = None  # the latest one
    new_samples: list[ShownSample] = field(default_factory=list)  # those since the last report
    # Numbers of each response of the present step, by name.
    distributions: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def add_sample(self, sample: ShownSample) -> None:
        """Show a sample from now on."""
        self.sample = sample
        self.new_samples.append(sample)

    def clear_step(self) -> None:
        """Forget the samples and numbers of the step that has been reported."""
        self.new_samples = []
        self.distributions = {}


class View(Protocol):
    """Shows a board to people."""

    def draw(self, board: Board) -> None:
        """Show its present state."""

    def close(self) -> None:
        """Stop showing."""


class Monitor:
    """A thread of the main rank that shows the board, from `start` to `close_view`.

    The main thread may be in one phase for long, and it must not wait for a slow disk or terminal.
    """

    def __init__(
        self, board: Board, output_dir: Path, world_size: int, view: View | None = None
    ) -> None:
        """Show nothing yet; `status.json` is written from `begin` on."""
        self._board = board
        self._path = output_dir / STATUS
        self._process = {
            "began": round(time.time(), 3),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "ranks": world_size,
        }
        self._view = view

        self._has_begun = False
        self._written = 0.0
        self._shown: tuple[object, ...] = ()
        self._is_failing = False
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Open the view, and start the thread."""
        if self._view is not None:
            self._view.draw(self._board)
            self._board.has_view = True
        self._thread.start()

    def begin(self) -> None:
        """Write the first status; from then on it is kept fresh."""
        self._has_begun = True
        self.write()

    def write(self) -> None:
        """Write the status now. A failure is logged once, and the run continues."""
        if not self._has_begun:
            return

        with self._writing:
            self._shown = self._place()
            self._written = time.monotonic()
            try:
                # Replaced as a whole, the file is never seen half written.
                temporary = self._path.with_name(f".{self._path.name}.tmp")
                text = json.dumps(self._status(), indent=1)
                temporary.write_text(f"{text}\n", encoding="utf-8")
                temporary.replace(self._path)
            except OSError as error:
                if not self._is_failing:
                    logger.warning("cannot write the status of the run: %s", error)
                self._is_failing = True
            else:
                self._is_failing = False

    def close_view(self) -> None:
        """Stop showing; later log lines appear below the last view."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._view is not None:
            self._view.close()
            self._board.has_view = False

    def end(self, state: State, message: str = "") -> None:
        """Write how the run has ended; any thread may call it."""
        self._closed.set()
        self._board.state = state
        self._board.message = message
        self.write()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if self._view is not None:
                self._view.draw(self._board)
            since = time.monotonic() - self._written
            has_changed = self._place() != self._shown
            if since >= _ALIVE_S or (has_changed and since >= _WRITE_S):
                self.write()

    def _place(self) -> tuple[object, ...]:
        """A value that changes when the status must be written again."""
        phases = self._board.phases
        return self._board.state, self._board.step, phases.entered, phases.progress

    def _status(self) -> dict[str, Any]:
        board = self._board
        progress = board.phases.progress
        left = board.seconds_left

        return {
            "version": _VERSION,
            "state": board.state,
            "message": board.message,
            "step": board.step,
            "of": board.steps,
            "phase": board.phases.name,
            "phase_seconds": round(board.phases.seconds, 1),
            "progress": None if progress is None else asdict(progress),
            "eta_seconds": None if left is None else round(left),
            "metrics": {name: json_number(value) for name, value in board.metrics.items()},
            "alarms": [asdict(alarm) for alarm in board.alarms],
            "updated": round(time.time(), 3),
            **self._process,
        }


class Timeline:
    """Records when one rank was in which phase, for the report: `timeline/rank_<n>.jsonl`.

    The first line, and that of each later start, describes the process; the others hold the phases
    of one training step each. After a failed write it stops, and training continues.
    """

    def __init__(self, output_dir: Path, rank: int, every: int, process: Mapping[str, Any]) -> None:
        """Record every `every`-th training step (0: none); `process` describes the process."""
        self._file = output_dir / TIMELINE / f"rank_{rank}.jsonl"
        self._every = every
        self._is_failing = False
        self._process = {"rank": rank, **process}

    def begin(self) -> None:
        """Write the description of the process."""
        self._append({"process": self._process})

    def write(self, step: int, spans: Sequence[Span]) -> None:
        """Record the phases of training step `step`, if it is one of those to record."""
        if not spans or not self._every or step % self._every:
            return

        begin = min(span.begin for span in spans)
        rows = []
        for span in sorted(spans, key=lambda span: span.begin):
            numbers = (span.begin - begin, span.seconds, span.busy)
            rows.append([span.phase, *(round(number, 4) for number in numbers)])
        self._append({"step": step, "begin": round(begin, 4), "spans": rows})

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._is_failing:
            return
        line = json.dumps(record, separators=(",", ":"))
        try:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as output:
                output.write(f"{line}\n")
        except OSError as error:
            self._is_failing = True
            logger.warning("phases are no longer recorded: cannot write %s: %s", self._file, error)
