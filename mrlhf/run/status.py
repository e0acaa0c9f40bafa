"""`status.json`: the state of a run, for other programs; docs/operations.md describes it.

The file is replaced as a whole, so a reader never sees half of it. This file does not know when it
is written.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.output_files import STATUS
from mrlhf.run.board import Board

_VERSION = 1


class StatusFile:
    """The file of one run, which the main rank writes."""

    def __init__(self, output_dir: Path, world_size: int) -> None:
        self._path = output_dir / STATUS
        self._began = time.time()
        self._process = {"pid": os.getpid(), "host": socket.gethostname(), "ranks": world_size}

    def write(self, board: Board) -> None:
        """Write the board; OSError if the file cannot be written."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps(self._content(board), indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._path)

    def _content(self, board: Board) -> dict[str, Any]:
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
            "metrics": _finite(board.metrics),
            "alarms": [asdict(alarm) for alarm in board.alarms],
            "began": round(self._began, 3),
            "updated": round(time.time(), 3),
            **self._process,
        }


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics, with None for a number that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
