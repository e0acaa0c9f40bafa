"""`alarms.jsonl`: one alarm a line, for the report of the run and for other programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mrlhf.run.alarms.watch import Alarm

logger = logging.getLogger(__name__)


class AlarmsFile:
    """Appends to the file. What cannot be written is given up, since it was logged as well."""

    def __init__(self, path: Path) -> None:
        """Create nothing yet."""
        self._path = path

    def write(self, alarm: Alarm) -> None:
        """Append an alarm."""
        self._write("a", [alarm])

    def replace(self, alarms: Iterable[Alarm]) -> None:
        """Let the file hold these alarms; without any, there is no file."""
        self._path.unlink(missing_ok=True)
        self._write("w", alarms)

    def _write(self, mode: str, alarms: Iterable[Alarm]) -> None:
        lines = "".join(f"{json.dumps(asdict(alarm))}\n" for alarm in alarms)
        if not lines:
            return
        try:
            with self._path.open(mode, encoding="utf-8") as output:
                output.write(lines)
        except OSError as error:
            logger.error("cannot write %s: %s", self._path, error)
