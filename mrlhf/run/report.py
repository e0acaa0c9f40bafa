"""The report at the end of a run: a summary, a PNG of its curves, and the seconds of each phase.

All of it comes from the run's metrics file, so the report can be made again later. This file does
not know how a metric is computed.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mrlhf.checkpoint.manifest import CHECKPOINTS, checkpoint_name, with_manifest
from mrlhf.checkpoint.output_files import METRICS
from mrlhf.checkpoint.summary import write_summary
from mrlhf.errors import CheckpointError, ConfigError, MrlhfError
from mrlhf.log import is_held_out, read_metrics
from mrlhf.metrics.table import CURVES
from mrlhf.run.alarms.history import History
from mrlhf.run.alarms.signs import best_step
from mrlhf.run.alarms.watch import Alarm, Watch

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]


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

    # The steps of supervised training have no phases but validation, which is not in them.
    phases = {phase: seconds for phase, seconds in totals.items() if phase != "step"}
    if phases.keys() <= {"testing"}:
        phases = totals
    whole = sum(phases.values())
    longest_first = sorted(phases.items(), key=lambda item: -item[1])
    parts = [f"{phase} {seconds / whole:.0%}" for phase, seconds in longest_first if whole]
    return [f"time: {', '.join(parts[:6])}"] if parts else []


def _next_lines(output_dir: Path, errors: Sequence[Alarm]) -> list[str]:
    """What to do now; a run with errors does not just go on."""
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
