"""Brings `metrics.jsonl` back to the step of a checkpoint, so that a resumed run can append to it.

It does not know what a metric means, nor what else a checkpoint holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mrlhf.errors import DataError
from mrlhf.log import metrics_line


@dataclass(frozen=True)
class ResumePoint:
    """Where a resumed run goes on.

    Attributes:
        step: the last step that the checkpoint holds in full.
        row: the metrics of that step; empty if nothing has been measured in it yet, as before the
            validation that comes before the first step.
    """

    step: int
    row: Mapping[str, float]


def rewind_metrics(file: Path, point: ResumePoint) -> None:
    """Drop the rows after the checkpoint's step, and add the row of that step if it is missing.

    If the checkpoint has no row, its step has yet to be measured, so a row of it is dropped too.
    A last line that was not written in full is dropped as well. Whenever the process is killed, the
    file holds either the old rows or the new ones.

    Args:
        file: `metrics.jsonl`; if it is missing, it is written.
        point: the checkpoint's step and row.

    Raises:
        DataError: a line before the last one is not a record.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    lines = text.split("\n")
    torn = lines.pop()  # what stands after the last line's end: nothing, if all lines are whole

    steps = []
    kept = []
    for number, line in enumerate(lines, start=1):
        step = _step(line, f"{file}:{number}")
        if step < point.step or (step == point.step and point.row):
            steps.append(step)
            kept.append(line)
    missing = bool(point.row) and point.step not in steps
    if not torn and not missing and len(kept) == len(lines):
        return

    if missing:
        kept.append(metrics_line(point.step, point.row))
    _replace(file, "".join(f"{line}\n" for line in kept))


def _step(line: str, where: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: not a JSON object with a step; remove the line") from error


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as output:
        output.write(text)
        output.flush()
        os.fsync(output.fileno())
    temporary.replace(file)
