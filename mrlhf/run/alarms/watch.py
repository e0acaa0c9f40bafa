"""Looks at the metrics of each step, and raises an alarm when a failure begins.

An alarm is raised once. It ends when its sign has been absent for some steps, and may then be
raised again. This file does not know the failures, nor who shows an alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mrlhf.run.alarms.history import History
from mrlhf.run.alarms.rules import RULES, Rule, Severity

_END_AFTER = 5  # steps without the sign


@dataclass(frozen=True)
class Alarm:
    """A failure that has begun; a line of `alarms.jsonl`.

    Attributes:
        step: the training step at which it was seen first.
        name: of the rule.
        severity: error: the run will most likely be of no use; warning: it may be.
        message: what was seen, with the numbers.
        cause: the likely cause, in words.
        key: the configuration key to change first.
        link: where more is written about it.
    """

    step: int
    name: str
    severity: Severity
    message: str
    cause: str
    key: str
    link: str

    @property
    def line(self) -> str:
        """The alarm in one line, for the console."""
        return (
            f"alarm {self.name} at step {self.step}: {self.message}; likely {self.cause}; change "
            f"{self.key}, see {self.link}"
        )


class Watch:
    """The alarms of one run."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        """Begin before the first step."""
        self._rules = rules
        self._history = History()
        self._on: dict[int, Alarm] = {}
        self._absent: dict[int, int] = {}

    @property
    def on(self) -> list[Alarm]:
        """The alarms that have been raised and have not ended, the oldest first."""
        return sorted(self._on.values(), key=lambda alarm: alarm.step)

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[Alarm]:
        """Take the metrics of training step `step`; returns the alarms that it raises."""
        self._history.add(step, metrics)
        raised = []
        for number, rule in enumerate(self._rules):
            message = rule.sign(self._history)
            if message is None:
                self._take_note_of_absence(number)
                continue

            self._absent[number] = 0
            if number not in self._on:
                alarm = Alarm(
                    step, rule.name, rule.severity, message, rule.cause, rule.key, rule.link
                )
                self._on[number] = alarm
                raised.append(alarm)
        return raised

    def replay(self, records: Iterable[Mapping[str, float | None]]) -> list[Alarm]:
        """Take the records of the steps so far, as `metrics.jsonl` has them.

        Returns:
            The alarms that they have raised.
        """
        raised = []
        for record in records:
            step = record["step"]
            if step:  # step 0 was measured before training
                raised += self.look(int(step), record)
        return raised

    def _take_note_of_absence(self, number: int) -> None:
        if number in self._on:
            self._absent[number] += 1
            if self._absent[number] >= _END_AFTER:
                del self._on[number]
