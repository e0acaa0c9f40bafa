"""Importance weights and statistics of rejection once more, for lists of log-ratios.

It shares no code with mrlhf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

Rows = list[list[float]]
"""A number for each token that counts, a list a response."""

_ESTIMATES: dict[str, Callable[[float], float]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}
_OF_SEQUENCE: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "mean": fmean,
    "max": max,
}


def estimates(statistic: str, rows: Rows) -> Rows:
    """The estimate of each token, or at each token that of its response, which has one."""
    *level, estimate = statistic.split("_")
    assert estimate in _ESTIMATES and level[-1] in ("token", *_OF_SEQUENCE), (
        f"the oracle has no plain version of {statistic}; add it to _ESTIMATES or _OF_SEQUENCE in "
        "tests/oracle/plain_correction.py"
    )
    of_tokens = [[_ESTIMATES[estimate](_cut(x)) for x in row] for row in rows]
    if level == ["token"]:
        return of_tokens
    return [[_OF_SEQUENCE[level[1]](row)] * len(row) for row in of_tokens]


def ratios(rows: Rows, correction: Any) -> Rows:
    """The ratio of each token, or at each token that of its response."""
    if correction.level == "token":
        return [[math.exp(_cut(x)) for x in row] for row in rows]
    return [[math.exp(_cut(sum(row)))] * len(row) for row in rows]


def weights(rows: Rows, correction: Any) -> Rows:
    """The ratios, truncated, or 0 outside a band; not normalised."""
    if correction.lower is None:
        return [[min(x, correction.upper) for x in row] for row in ratios(rows, correction)]
    return [
        [x if correction.lower <= x <= correction.upper else 0.0 for x in row]
        for row in ratios(rows, correction)
    ]


def _cut(log_ratio: float) -> float:
    return min(max(log_ratio, -20.0), 20.0)
