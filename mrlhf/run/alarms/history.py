"""The values that the alarms remember of each metric: the first, the latest and the extreme ones.

Of held-out results every value is kept; otherwise the memory does not grow with the number of
steps. This file does not know what a metric means.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from mrlhf.log import is_held_out

_FIRST = 3
RECENT = 2048  # steps of a tenth of a second fill some minutes


@dataclass
class _Series:
    """The finite values of one metric; `step` is the step of the latest one."""

    step: int = 0
    count: int = 0
    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, step: int, value: float) -> None:
        self.step = step
        self.count += 1
        if len(self.first) < _FIRST:
            self.first.append(value)
        self.recent.append(value)
        self.lowest = min(self.lowest, value)
        self.highest = max(self.highest, value)


class History:
    """The metrics of a run up to its present step.

    A metric that the present step lacks, or has as NaN or infinity, has no latest values.
    """

    def __init__(self) -> None:
        self._step = 0
        self._series: dict[str, _Series] = {}
        self._held_out: dict[str, dict[int, float]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Make `step` the present step; a number that is not finite may be None."""
        self._step = step
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._series.setdefault(name, _Series()).add(step, float(value))
                if is_held_out(name.removeprefix("se/")):
                    self._held_out.setdefault(name, {})[step] = float(value)

    def judged(self) -> Iterator[tuple[str, dict[int, float], dict[int, float]]]:
        """Each held-out result that has standard errors: name, values and errors by step."""
        for name, values in self._held_out.items():
            errors = self._held_out.get(f"se/{name}", {})
            if known := {step: value for step, value in values.items() if step in errors}:
                yield name, known, errors

    def now(self, name: str) -> float | None:
        """The value of the present step; None if it was not measured."""
        recent = self.recent(name, 1)
        return recent[0] if recent else None

    def recent(self, name: str, count: int) -> list[float]:
        """The latest `count` values, the present one last; empty if there are fewer."""
        assert count <= RECENT, f"the history keeps the latest {RECENT} values"
        series = self._series.get(name)
        if series is None or series.step != self._step or series.count < count:
            return []
        return list(islice(reversed(series.recent), count))[::-1]

    def first(self, name: str) -> list[float]:
        """The first values, at most three."""
        return self._series[name].first if name in self._series else []

    def count(self, name: str) -> int:
        """How often the metric was measured."""
        return self._series[name].count if name in self._series else 0

    def extremes(self, name: str) -> tuple[float, float]:
        """The lowest and the highest value so far."""
        series = self._series[name]
        return series.lowest, series.highest

    def measured(self, prefix: str) -> list[str]:
        """The metrics of the present step whose names begin with `prefix`, sorted."""
        return sorted(
            name
            for name, series in self._series.items()
            if name.startswith(prefix) and series.step == self._step
        )
