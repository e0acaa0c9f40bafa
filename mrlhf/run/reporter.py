"""Passes the metrics of a trainer to files, trackers, alarms and the board.

Only the main rank writes. This file does not know what a metric means.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrlhf.checkpoint.output_files import ALARMS, METRICS
from mrlhf.config.roots import AnyConfig
from mrlhf.log import (
    HELD_OUT,
    MetricsWriter,
    Progress,
    metrics_line,
    parse_metrics_line,
    read_metrics,
)
from mrlhf.metrics.table import COLUMNS, unit_of
from mrlhf.metrics.trackers import Tracked, TrackedRun, Trackers, finite
from mrlhf.run.alarms.watch import Watch, write_alarms
from mrlhf.run.board import Board
from mrlhf.run.monitor import Monitor
from mrlhf.run.startup import Run

logger = logging.getLogger(__name__)

_CURVE_POINTS = 48


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a resumed run continues."""

    step: int  # the last step that the checkpoint holds in full
    # The metrics of that step; empty if nothing has been measured in it yet, as before the
    # validation that comes before the first step.
    row: Mapping[str, float]


class Reporter:
    """Writes and shows the metrics of each step."""

    @staticmethod
    def of(run: Run, config: AnyConfig, total_steps: int, resumed: ResumePoint | None) -> Reporter:
        """The reporter of this rank; it does nothing on all but the main one."""
        if not run.is_main_rank:
            return NoReporter()
        return Reporter(config, total_steps, resumed, run.board, run.monitor)

    def __init__(
        self,
        config: AnyConfig,
        total_steps: int,
        resumed: ResumePoint | None = None,
        board: Board | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        """Open the files and drop the rows after the step of `resumed` (None for a new run).

        Raises:
            ConfigError: a file or a tracker cannot be opened.
            DataError: the earlier rows of a resumed run cannot be read at all.
        """
        self._board = board or Board()
        self._monitor = monitor
        self._watch = Watch()
        self._curves: dict[str, deque[float]] = {}

        output_dir = Path(config.trainer.output_dir)
        if resumed is not None:
            rewind_metrics(output_dir / METRICS, resumed)
        self._writer = MetricsWriter(output_dir)
        self._alarms_file = output_dir / ALARMS
        self._trackers = _open_trackers(config, output_dir, resumed)

        first_step = 0
        if resumed is not None:
            first_step = resumed.step
            self._take_up(read_metrics(output_dir / METRICS), resumed)
        self._progress = Progress(total_steps, first_step, config.trainer.log_freq)
        self._board.steps = total_steps
        self._board.step = first_step
        self._board.state = "training"

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; step 0 was measured before training."""
        self._writer.write(step, metrics)
        self._progress.update(step, metrics, self._board.has_view)
        raised = self._watch.look(step, metrics)
        for alarm in raised:
            logger.warning("%s", alarm.line)
        write_alarms(self._alarms_file, raised)

        board = self._board
        self._add_to_curves(metrics)
        texts = {f"samples/{sample.kind}": sample.text for sample in board.new_samples}
        self._trackers.write(Tracked(step, finite(metrics), texts, board.distributions))
        board.clear_step()

        board.step = step
        board.metrics = metrics
        board.alarms = self._watch.on
        board.seconds_left = self._progress.seconds_left(step)
        if self._monitor is not None:
            self._monitor.write()

    def close(self) -> None:
        """Close files and trackers."""
        self._writer.close()
        self._trackers.close()

    def _take_up(self, records: Sequence[Mapping[str, float]], resumed: ResumePoint) -> None:
        """Take the metrics of the earlier steps, as if the run had never been interrupted."""
        for record in records:
            self._add_to_curves({name: value for name, value in record.items() if name != "step"})
        write_alarms(self._alarms_file, self._watch.replay(records), replace=True)
        self._board.alarms = self._watch.on
        self._board.metrics = resumed.row
        # The trackers' last step is written again, since the process may have ended before that.
        self._trackers.write(Tracked(resumed.step, finite(resumed.row)))

    def _add_to_curves(self, metrics: Mapping[str, float | None]) -> None:
        """Add a step to the curves that people are shown, those of the validation included."""
        validation = [name for name in sorted(metrics) if name.startswith(HELD_OUT["validation"])]
        for label, name in [*COLUMNS, *zip(validation, validation, strict=True)]:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                label = f"{label} {unit_of(name)}".rstrip()
                self._curves.setdefault(label, deque(maxlen=_CURVE_POINTS)).append(value)
        self._board.curves = {label: list(values) for label, values in self._curves.items()}


class NoReporter(Reporter):
    """The reporter of the other ranks: it writes nothing."""

    def __init__(self) -> None:
        """Open nothing: the base class would."""

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _open_trackers(config: AnyConfig, output_dir: Path, resumed: ResumePoint | None) -> Trackers:
    section = config.trainer
    first_step = None
    if resumed is not None:
        first_step = resumed.step if resumed.row else resumed.step + 1
    run = TrackedRun(
        output_dir=output_dir,
        project=section.project_name,
        name=section.experiment_name or output_dir.resolve().name,
        config=config.model_dump(),
        first_step=first_step,
    )
    return Trackers(section.trackers, run)


def rewind_metrics(file: Path, point: ResumePoint) -> None:
    """Drop the rows after the checkpoint's step, and add the row of that step if it is missing.

    If the checkpoint has no row, its step has yet to be measured, so a row of it is dropped too. An
    incomplete last line and damaged lines are dropped as well; if there are damaged ones, the file
    is first copied to `metrics.damaged_<n>.jsonl`. Whenever the process is killed, the file holds
    either the old rows or the new ones. If it is missing, it is written.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines = text.split("\n")
    torn = lines.pop()  # what stands after the last line's end: nothing, if all lines are whole

    steps = []
    kept = []
    damaged = []
    for number, line in enumerate(lines, start=1):
        record = parse_metrics_line(line)
        if record is None:
            damaged.append(str(number))
            continue
        step = record["step"]
        if step < point.step or (step == point.step and point.row):
            steps.append(step)
            kept.append(line)
    missing = bool(point.row) and point.step not in steps
    if not torn and not missing and len(kept) == len(lines):
        return

    if damaged:
        logger.warning(
            "%s: damaged lines are left out: %s; the file as it was is kept as %s",
            file,
            ", ".join(damaged),
            _copy_aside(file).name,
        )
    if missing:
        kept.append(metrics_line(point.step, point.row))
    _replace(file, "".join(f"{line}\n" for line in kept))


def _copy_aside(file: Path) -> Path:
    """Copy the file beside it, under a name of its own."""
    number = 1
    while (aside := file.with_name(f"{file.stem}.damaged_{number}{file.suffix}")).exists():
        number += 1
    shutil.copyfile(file, aside)
    return aside


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as output:
        output.write(text)
        output.flush()
        os.fsync(output.fileno())
    temporary.replace(file)
