"""The values that the alarms remember of each metric: the first, the latest and the extreme ones.

The memory does not grow with the number of steps. This file does not know what a metric means.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

_FIRST = 3
_RECENT = 24


@dataclass
class _Series:
    """The finite values of one metric; `step` is the step of the latest one."""

    step: int = 0
    count: int = 0
    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
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

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Make `step` the present step; a number that is not finite may be None."""
        self._step = step
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._series.setdefault(name, _Series()).add(step, float(value))

    def now(self, name: str) -> float | None:
        """The value of the present step; None if it was not measured."""
        recent = self.recent(name, 1)
        return recent[0] if recent else None

    def recent(self, name: str, count: int) -> list[float]:
        """The latest `count` values, the present one last; empty if there are fewer."""
        assert count <= _RECENT, f"the history keeps the latest {_RECENT} values"
        series = self._series.get(name)
        if series is None or series.step != self._step or series.count < count:
            return []
        return list(series.recent)[-count:]

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
