"""Which metrics have no row in the table of metrics."""

from collections.abc import Iterable

from mrlhf.metrics.table import TABLE


def without_row(names: Iterable[str]) -> list[str]:
    """The names that have no row, apart from `step`, which is no metric but the key of a line."""
    return [
        name for name in names if name != "step" and not any(row.describes(name) for row in TABLE)
    ]
