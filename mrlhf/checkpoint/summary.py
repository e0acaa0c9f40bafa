"""`summary.json`: the few numbers that a run is judged by, for people and scripts.

This file writes and reads summaries. It does not know what the numbers mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrlhf.errors import DataError

SUMMARY = "summary.json"


def write_summary(output_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` into `output_dir`."""
    (output_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def read_summary(output_dir: Path) -> dict[str, Any] | None:
    """The summary of a run; None if it has not ended; DataError if the file is damaged."""
    file = output_dir / SUMMARY
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is damaged: {error}; remove it") from error
    if not isinstance(summary, dict):
        raise DataError(f"{file} is no summary: it holds a {type(summary).__name__}; remove it")
    return summary
