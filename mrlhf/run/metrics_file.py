"""Brings `metrics.jsonl` back to the step of a checkpoint, so that a resumed run can append to it.

It knows neither the meaning of a metric nor the other contents of a checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mrlhf.log import metrics_line, parse_metrics_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a resumed run continues."""

    step: int  # the last step that the checkpoint holds in full
    # The metrics of that step; empty if nothing has been measured in it yet, as before the
    # validation that comes before the first step.
    row: Mapping[str, float]


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
