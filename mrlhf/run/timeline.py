"""Records when each rank was in which phase, for the report of the run.

Each rank has a file of its own, `timeline/rank_<n>.jsonl`. Its first line, and that of each later
start, describes the process; the others hold the phases of one training step each. This file does
not know what a phase is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.output_files import TIMELINE
from mrlhf.parallel.phases import Span

logger = logging.getLogger(__name__)


class Timeline:
    """Appends to the file of one rank. After a failed write it stops, and training continues."""

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
