"""Passes the metrics of a trainer to files, trackers, alarms and the board, and sums them up.

Only the main rank writes. The report at the end (a summary, a PNG of the curves, the seconds of
each phase) comes from the run's metrics file. This file does not know how a metric is computed.
"""

from __future__ import annotations

import logging
import math
import shlex
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mrlhf.checkpoint.manifest import CHECKPOINTS, checkpoint_name, with_manifest
from mrlhf.checkpoint.output_files import ALARMS, METRICS, write_summary
from mrlhf.config.roots import AnyConfig
from mrlhf.data.sample_table import written_whole
from mrlhf.errors import CheckpointError, ConfigError, MrlhfError
from mrlhf.log import (
    HELD_OUT,
    MetricsWriter,
    Progress,
    is_held_out,
    metrics_line,
    parse_metrics_line,
    read_metrics,
)
from mrlhf.metrics.table import COLUMNS, CURVES, unit_of
from mrlhf.metrics.trackers import Tracked, TrackedRun, Trackers, finite
from mrlhf.run.alarms.history import History
from mrlhf.run.alarms.signs import best_step
from mrlhf.run.alarms.watch import Alarm, Watch, write_alarms
from mrlhf.run.board import Board, Monitor
from mrlhf.run.startup import Run
from mrlhf.weights.files import flush

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]

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
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        flush(temporary)


def _copy_aside(file: Path) -> Path:
    """Copy the file beside it, under a name of its own."""
    number = 1
    while (aside := file.with_name(f"{file.stem}.damaged_{number}{file.suffix}")).exists():
        number += 1
    shutil.copyfile(file, aside)
    return aside


def closing_report(output_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write curves.png and summary.json; log the results, the time's use, and what to do next.

    Raises:
        CheckpointError: the summary could not be written, so that the run does not count as
            finished.
    """
    lines = _result_lines(summary)
    watch = Watch()
    try:
        records = read_metrics(output_dir / METRICS)
        watch.replay(records)
        lines += _best_lines(watch.history, output_dir, summary)
        lines += _phase_lines(records)
        measured = _curves(records)
        if measured:
            picture = output_dir / "curves.png"
            plot_curves(records, picture, measured)
            lines.append(f"curves: {picture}")
    except (OSError, MrlhfError) as error:
        logger.warning("no curves are drawn: %s", error)

    try:
        write_summary(output_dir, summary)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the summary into {output_dir}: {error}; the model is exported, so start "
            "the same command again when there is room, or leave it"
        ) from error
    lines += _next_lines(output_dir, [alarm for alarm in watch.on if alarm.severity == "error"])
    logger.info("finished\n%s", "\n".join(f"  {line}" for line in lines))


def plot_curves(records: Sequence[Record], png_path: Path, names: Sequence[str]) -> None:
    """Draw metrics over the steps into a PNG, a panel each; ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("curves need matplotlib: pip install matplotlib") from error

    width = min(3, len(names))
    height = math.ceil(len(names) / width)
    figure = Figure(figsize=(4.5 * width, 3.2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, name in enumerate(names, start=1):
        axes = figure.add_subplot(height, width, panel)
        steps = [record["step"] for record in records if name in record]
        numbers = [math.nan if x is None else x for x in _values(records, name)]
        axes.plot(steps, numbers, marker=".")
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    figure.savefig(png_path, dpi=120)


def ppo_achievements(output_dir: Path) -> dict[str, float | None]:
    """Accuracy, reward and KL at the start and at the end, if the run measured them.

    Accuracy and reward are those on the test prompts; if there are none, on the validation prompts.
    """
    records = read_metrics(output_dir / METRICS)
    tested = _history(records, "test/", "/reward_mean")
    split = "test" if tested else "val"
    achievements: dict[str, float | None] = {}
    for title, kind in (("accuracy", split), ("sampled_accuracy", f"{split}_sampled")):
        values = _history(records, f"{kind}/", "/acc@1")
        if values:
            achievements[f"start_{title}"] = values[0]
            achievements[f"final_{title}"] = values[-1]

    # PPO raises the reward of sampled responses: of held-out prompts, if that was measured.
    rewards = (
        _history(records, f"{split}_sampled/", "/reward_mean")
        or _history(records, f"{split}/", "/reward_mean")
        or _values(records, "critic/score/mean")
    )
    if rewards:
        achievements["reward_start"] = rewards[0]
        achievements["reward_final"] = rewards[-1]

    kls = _values(records, "actor/reward_kl_penalty")
    if kls:
        achievements["kl_final"] = kls[-1]
    return achievements


def _curves(records: Sequence[Record]) -> list[str]:
    """The metrics to draw: held-out rows first, then those of the table that the run measured."""
    measured = {name for record in records for name in record}
    held_out = sorted(name for name in measured if is_held_out(name))
    return held_out + [name for name in CURVES if name in measured]


def _values(records: Sequence[Record], name: str) -> list[Any]:
    return [record[name] for record in records if name in record]


def _history(records: Sequence[Record], prefix: str, ending: str) -> list[float]:
    """The mean of a held-out metric over the data sets, for each record that has it."""
    means = []
    for record in records:
        values = []
        for name, value in record.items():
            if name.startswith(prefix) and name.endswith(ending) and value is not None:
                values.append(value)
        if values:
            means.append(fmean(values))
    return means


def _result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary; what was measured at the start and at the end stands on one line."""
    lines = []
    for name, value in summary.items():
        title = name.removeprefix("start_").removesuffix("_start")
        ends = [summary[end] for end in (f"final_{title}", f"{title}_final") if end in summary]
        if title != name and ends:
            lines.append(f"{title}: {_short(value)} -> {_short(ends[0])}")
        elif not (name.startswith("final_") or f"{name.removesuffix('_final')}_start" in summary):
            lines.append(f"{name}: {_short(value)}")
    return lines


def _best_lines(history: History, output_dir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The best held-out result and where its model is, if the run has ended with another one."""
    judged = [(name, values) for name, values, _ in history.judged()]
    if not judged:
        return []
    name, values = max(judged, key=lambda item: len(item[1]))
    step = best_step(name, values)
    if values[step] == values[max(values)]:
        return []

    saved = output_dir / CHECKPOINTS / checkpoint_name(step, unfinished_step=False)
    mode = " trainer.export_best_mode=min" if name.endswith("loss") else ""
    place = str(saved) if saved.is_dir() else f"not kept; see trainer.export_best={name}{mode}"
    if step == summary.get("best_step"):
        place = summary["best_checkpoint"]
    elif step == 0:
        place = "what the run began with"
    return [f"best: {name} {_short(values[step])} after step {step}; its model: {place}"]


def _phase_lines(records: Sequence[Record]) -> list[str]:
    """Which part of the time each phase of the steps took, the longest first, on one line."""
    totals: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("timing_s/") and value is not None:
                phase = name.removeprefix("timing_s/")
                totals[phase] = totals.get(phase, 0.0) + value

    # The steps of supervised training have no phases; what else takes time is not in them.
    phases = {phase: seconds for phase, seconds in totals.items() if phase != "step"}
    if phases.keys() <= {"testing", "save_checkpoint"}:
        phases = totals
    whole = sum(phases.values())
    longest_first = sorted(phases.items(), key=lambda item: -item[1])
    parts = [f"{phase} {seconds / whole:.0%}" for phase, seconds in longest_first if whole]
    return [f"time: {', '.join(parts[:6])}"] if parts else []


def _next_lines(output_dir: Path, errors: Sequence[Alarm]) -> list[str]:
    """Proposals for the user; a run with errors does not just go on."""
    place = shlex.quote(str(output_dir))
    told = {
        alarm.key: f"  change {alarm.key}: {alarm.name} at step {alarm.step}" for alarm in errors
    }
    lines = [
        "next:",
        *told.values(),
        f"  mrlhf report {place}    one HTML file with its curves and samples",
        "  mrlhf docs conversion    where else its model can go",
    ]
    if with_manifest(output_dir / CHECKPOINTS) and not errors:
        lines.append("  the same command with a larger trainer.total_steps goes on")
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
