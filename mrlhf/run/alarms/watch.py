"""Looks at the metrics of each step, and raises an alarm when a failure begins.

An alarm is raised once. It ends when its sign has been absent for some steps, and may then be
raised again. This file does not know the failures, nor who shows an alarm.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mrlhf.run.alarms.history import History
from mrlhf.run.alarms.rules import RULES, Rule, Severity

logger = logging.getLogger(__name__)

_END_AFTER = 5  # steps without the sign


@dataclass(frozen=True)
class Alarm:
    """A failure that has begun; a line of `alarms.jsonl`. The fields are those of its rule."""

    step: int  # the training step at which it was seen first
    name: str
    severity: Severity
    message: str  # the sign with its numbers
    cause: str
    key: str
    link: str  # the page that says more about it

    @property
    def line(self) -> str:
        """The alarm in one line, for the console."""
        return (
            f"alarm {self.name} at step {self.step}: {self.message}; likely {self.cause}; change "
            f"{self.key}; 'mrlhf docs {self.link.partition('#')[2]}' says more"
        )


class Watch:
    """The alarms of one run."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._rules = rules
        self.history = History()
        self._on: dict[int, Alarm] = {}
        self._absent: dict[int, int] = {}

    @property
    def on(self) -> list[Alarm]:
        """The alarms that have been raised and have not ended, the oldest first."""
        return sorted(self._on.values(), key=lambda alarm: alarm.step)

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Take the metrics of `step`, 0 before training; returns the alarms that it raises."""
        self.history.add(step, metrics)
        raised = []
        for number, rule in enumerate(self._rules):
            message = rule.sign(self.history)
            self._absent[number] = 0 if message else self._absent.get(number, 0) + 1
            if self._absent[number] >= _END_AFTER:
                self._on.pop(number, None)

            # A result that has fallen is reported once, though its likely cause may change.
            names = {alarm.name for alarm in self._on.values()}
            is_reported = number in self._on or (rule.name == "held_out" and rule.name in names)
            if message is not None and not is_reported:
                alarm = Alarm(
                    step, rule.name, rule.severity, message, rule.cause, rule.key, rule.link
                )
                self._on[number] = alarm
                raised.append(alarm)
        return raised

    def replay(self, records: Iterable[Mapping[str, float | None]]) -> list[Alarm]:
        """Take the records of `metrics.jsonl` so far; returns the alarms that they have raised."""
        raised = []
        for record in records:
            raised += self.look(int(record["step"] or 0), record)
        return raised


def write_alarms(path: Path, alarms: Iterable[Alarm], *, replace: bool = False) -> None:
    """Append alarms to `alarms.jsonl`, one a line, or `replace` all earlier ones by them."""
    if replace:
        path.unlink(missing_ok=True)
    lines = "".join(f"{json.dumps(asdict(alarm))}\n" for alarm in alarms)
    if not lines:
        return
    try:
        with path.open("a", encoding="utf-8") as output:
            output.write(lines)
    except OSError as error:
        # The alarms have been logged as well, so nothing is tried again.
        logger.error("cannot write %s: %s", path, error)
