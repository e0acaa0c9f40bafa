"""The output of a run: log lines with the rank in front, and the metrics file.

Rank 0 writes all of it; other ranks only log warnings, and construct no writer. The meaning of each
metric stands in the table of `metrics`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from mrlhf.errors import ConfigError, DataError
from mrlhf.metrics.table import COLUMNS, unit_of
from mrlhf.printable import printable, wrapped

logger = logging.getLogger(__name__)

_SAME_EVERYWHERE = ("mrlhf.data", "mrlhf.inputs", "mrlhf.preflight", "mrlhf.rollout")
Console = Literal["auto", "view", "plain", "quiet"]

# The prefixes of the metrics of held-out rows.
HELD_OUT = {"validation": ("val/", "val_sampled/"), "test": ("test/", "test_sampled/")}


class _StderrHandler(logging.Handler):
    """Looks up standard error for each line, so that a line goes above a view of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(wrapped(printable(self.format(record)), sys.stderr) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def configure_logging(rank: int, console: Console = "auto") -> None:
    """Send log lines to standard error with the rank in front; a second call replaces the first.

    mrlhf's own lines are shown from INFO on rank 0, unless the console is quiet, and from WARNING
    on other ranks; lines of other packages from WARNING. Warnings about data, models and rollouts
    are shown on rank 0 alone, since every rank has the same. A terminal gets a shorter prefix.
    """
    handler = _StderrHandler()
    form = f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"
    if sys.stderr.isatty():
        form = f"%(asctime)s {f'[rank {rank}] ' if rank else ''}%(levelname)s %(message)s"
    times = "%H:%M:%S" if sys.stderr.isatty() else None
    handler.setFormatter(logging.Formatter(form, times))

    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)

    # Deprecation warnings of these packages are about our code, not about the user's.
    for third_party in (r"torch\.distributed", r"megatron\.core"):
        warnings.filterwarnings("ignore", module=third_party)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # where 0.19 says that it is old

    speaks = rank == 0 and console != "quiet"
    logging.getLogger("mrlhf").setLevel(logging.INFO if speaks else logging.WARNING)
    for same_everywhere in _SAME_EVERYWHERE:
        logging.getLogger(same_everywhere).setLevel(logging.ERROR if rank else logging.NOTSET)


def quiet_transformers() -> None:
    """Hide the warnings of transformers and of its hub, unless their VERBOSITY asks for them."""
    # They read the variable when they are imported; if that has been done, the level counts.
    for prefix, package in (("TRANSFORMERS", "transformers"), ("HF_HUB", "huggingface_hub")):
        if os.environ.setdefault(f"{prefix}_VERBOSITY", "error") == "error":
            logging.getLogger(package).setLevel(logging.ERROR)


class MetricsWriter:
    """Appends the metrics of each step to `metrics.jsonl`."""

    def __init__(self, output_dir: Path) -> None:
        """Open the file, to append, and make its directory; ConfigError if that fails."""
        self._path = output_dir / "metrics.jsonl"
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            # Without a buffer the file takes what fits on a disk, and tells how much that was.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"trainer.output_dir {output_dir}: cannot write metrics: {error}; remove what is "
                "in the way, or choose another directory"
            ) from error

        self._unwritten = b""
        self._is_failing = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line at once; a number that is not finite becomes null.

        If the disk is full, the line is kept and written as soon as there is room.
        """
        self._unwritten += (metrics_line(step, metrics) + "\n").encode()
        self._write_what_fits()

    def close(self) -> None:
        """Close the file; log an error if rows are lost."""
        self._write_what_fits()
        if self._unwritten:
            lost = self._unwritten.count(b"\n")
            logger.error("the last %d rows of %s could not be written", lost, self._path)
        self._file.close()

    def _write_what_fits(self) -> None:
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._unwritten = self._unwritten[written:]
        except OSError as error:
            if not self._is_failing:
                logger.error(
                    "cannot write %s: %s; training goes on, and the rows are written as soon as "
                    "that is possible",
                    self._path,
                    error,
                )
            self._is_failing = True
        else:
            self._is_failing = False


def metrics_line(step: int, metrics: Mapping[str, float]) -> str:
    """The line of a step in `metrics.jsonl`, without its end."""
    assert "step" not in metrics, "'step' is the line's own key"
    numbers = {name: json_number(value) for name, value in metrics.items()}
    return json.dumps({"step": step, **numbers}, sort_keys=True, allow_nan=False)


class Progress:
    """Shows the progress of a run as log lines, and estimates the time left."""

    def __init__(self, total_steps: int, first_step: int = 0, log_freq: int = 1) -> None:
        """Start the clock.

        Args:
            first_step: steps that were done before the run was resumed; the time left is estimated
                from the steps done since.
            log_freq: steps between lines; the last step and every validation have a line too.
        """
        self._total_steps = total_steps
        self._first_step = first_step
        self._log_freq = log_freq
        self._start = time.monotonic()

    def seconds_left(self, step: int) -> float | None:
        """Estimated time from the end of `step` to the end of the run; None at the first step."""
        if step <= self._first_step:
            return None
        per_step = (time.monotonic() - self._start) / (step - self._first_step)
        return per_step * (self._total_steps - step)

    def update(self, step: int, metrics: Mapping[str, float], has_view: bool = False) -> None:
        """Show that `step` is done, and its metrics; step 0 was measured before training.

        A view on the terminal shows the steps itself, but no earlier validation.
        """
        if step and not has_view and (step % self._log_freq == 0 or step == self._total_steps):
            self._show_step(step, metrics)

        when = f"after step {step}" if step else "before training"
        for title, prefixes in HELD_OUT.items():
            names = [name for name in sorted(metrics) if name.startswith(prefixes)]
            if names:
                measured = ", ".join(f"{name} {metrics[name]:.4g}" for name in names)
                logger.info("%s %s: %s", title, when, measured)

    def _show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = []
        for label, name in COLUMNS:
            if name in metrics:
                shown.append(f"{label} {in_digits(metrics[name])} {unit_of(name)}".rstrip())
        parts = [f"step {step}/{self._total_steps}", *shown]
        seconds = self.seconds_left(step)
        if seconds is not None:
            parts.append(f"{timedelta(seconds=round(seconds))} left{_until(seconds)}")
        logger.info("%s", ", ".join(parts))


def in_digits(value: float) -> str:
    """A number for people: four digits, or all before the point."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _until(seconds: float) -> str:
    """The clock's time in so many seconds, if that is worth a look."""
    if seconds < 60:
        return ""
    form = "%H:%M" if seconds < 43200 else "%a %H:%M"
    return time.strftime(f", until {form}", time.localtime(time.time() + seconds))


def is_held_out(metric: str) -> bool:
    """Whether a metric of this name was measured on held-out rows."""
    return any(metric.startswith(prefixes) for prefixes in HELD_OUT.values())


def parse_metrics_line(line: str) -> dict[str, Any] | None:
    """The record in a line of `metrics.jsonl`; None if the line is damaged."""
    try:
        record: dict[str, Any] = json.loads(line)
        return record if isinstance(record["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def read_metrics(metrics_jsonl: Path) -> list[dict[str, Any]]:
    """Read the records that `MetricsWriter` wrote, sorted by step.

    If a resumed run has written a step again, its later record is returned. A damaged line is left
    out with a warning; the last line may still be being written.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        text = metrics_jsonl.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read metrics: {error}") from error

    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        record = parse_metrics_line(line)
        if record is None:
            logger.warning("%s:%d: the line is damaged, and is left out", metrics_jsonl, number)
        else:
            records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def json_number(value: float | None) -> float | None:
    """The number as JSON has it: None if it is not finite."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
