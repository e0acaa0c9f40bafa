"""The table of metrics: each row says what a metric means and how it is reduced.

Columns of the console, curves, bounds of the alarms, the names that an update adds up, and the page
`docs/metrics.md` come from it. It does not know who measures a metric.
"""

from __future__ import annotations

from functools import cache

from mrlhf.metrics.learning import CRITIC, HELD_OUT, LENGTHS, PAIRS, POLICY, SCORES
from mrlhf.metrics.metric import Metric
from mrlhf.metrics.mismatch import CORRECTION, PROBABILITIES
from mrlhf.metrics.work import CARRIED, EPISODES, OPTIMIZER, SAMPLING, SPEED

CHAPTERS = (
    *(SCORES, POLICY, CRITIC, PAIRS, LENGTHS, PROBABILITIES, CORRECTION),
    *(OPTIMIZER, SAMPLING, CARRIED, EPISODES, SPEED, HELD_OUT),
)
TABLE = tuple(row for chapter in CHAPTERS for row in chapter.rows)

# The prefixes of names, up to the first slash.
KINDS = tuple(sorted({name.split("/")[0] for row in TABLE for name in row.names}))
# Label and metric of each number that people are shown; a run has some of them.
COLUMNS = tuple((row.label, name) for row in TABLE if row.label for name in row.names)
# The metrics in the picture of a run's curves; one that was not measured is left out.
CURVES = tuple(name for row in TABLE if row.curve for name in row.names)


@cache
def row_of(name: str) -> Metric:
    """The row of a metric; KeyError if it has none, so add one."""
    for row in TABLE:
        if row.describes(name):
            return row
    raise KeyError(f"metric {name} has no row in mrlhf/metrics/; add one")


def unit_of(name: str) -> str:
    """The unit of a metric, if it tells a reader more than the metric's name does."""
    unit = row_of(name).unit
    return "" if unit in ("loss", "ratio", "score", "share") else unit


def upper_bound(name: str) -> float:
    """The number that the metric stays below in a healthy run."""
    bound = row_of(name).below
    assert bound is not None, f"{name} has no upper bound"
    return bound


def lower_bound(name: str) -> float:
    """The number that the metric stays above in a healthy run."""
    bound = row_of(name).above
    assert bound is not None, f"{name} has no lower bound"
    return bound


@cache
def names_of(role: str) -> tuple[str, ...]:
    """The metrics of a model's update, found by their prefix; in the same order on every rank."""
    names = (name for row in TABLE for name in row.names)
    return tuple(name for name in names if name.startswith(f"{role}/"))
