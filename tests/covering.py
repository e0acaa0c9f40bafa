"""Chooses combinations in which every two choices that go together meet at least once.

With a dozen axes the full product is too long to run. Most faults show as soon as two choices meet,
so a few dozen combinations find nearly all that the product would. This file does not know what is
combined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
"""One combination: by axis, the value that is chosen."""
Choice = tuple[str, int]
"""An axis, and the number of one of its values."""
Pair = tuple[Choice, Choice]

# For each new row, so many of the pairs that are still missing are tried as its beginning.
_ATTEMPTS = 48


@dataclass(frozen=True)
class Rule:
    """What must hold between values of some axes.

    Attributes:
        axes: the axes.
        holds: takes a value of each, in this order.
    """

    axes: tuple[str, ...]
    holds: Callable[..., bool]


def covering_rows(
    axes: Mapping[str, Sequence[Any]], rules: Sequence[Rule], cost: str | None = None
) -> list[Row]:
    """Rows that keep all rules and together hold every pair of values that some such row holds.

    The same arguments always give the same rows. They cost little, though not the least.

    Args:
        axes: by name, the values to choose from.
        rules: those that name an axis which is not there are left out.
        cost: the axis whose value is the cost of a row; None: all rows cost the same.
    """
    search = _Search(axes, [rule for rule in rules if set(rule.axes) <= axes.keys()])
    missing = dict.fromkeys(search.feasible_pairs())
    rows: list[Row] = []

    while missing:
        best: dict[str, int] = {}
        most = 0.0  # pairs that are still missing, for what a row costs
        for pair in list(missing)[:_ATTEMPTS]:
            for chosen, price in _priced(dict(pair), axes, cost):
                candidate = search.complete(chosen, missing)
                if candidate is None:
                    continue
                gain = sum(other in missing for other in _pairs_of(candidate, axes)) / price
                if gain > most:
                    best = candidate
                    most = gain
        for pair in _pairs_of(best, axes):
            missing.pop(pair, None)
        search.used.update(best.items())
        rows.append({axis: axes[axis][best[axis]] for axis in axes})
    return rows


class _Search:
    """Finds rows that keep the rules, axis by axis; values are known by their numbers.

    Attributes:
        used: how often each value has been chosen.
    """

    def __init__(self, axes: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> None:
        self._axes = axes
        self._places = {axis: place for place, axis in enumerate(axes)}
        self._rules_of: dict[str, list[Rule]] = {axis: [] for axis in axes}
        for rule in rules:
            for axis in rule.axes:
                self._rules_of[axis].append(rule)
        self.used: Counter[Choice] = Counter()
        # Axes with many rules first: a dead end is then found early.
        self._order = sorted(axes, key=lambda axis: -len(self._rules_of[axis]))

    def feasible_pairs(self) -> Iterator[Pair]:
        """Every two values of different axes that a row can hold together."""
        for first, second in combinations(self._axes, 2):
            numbers = range(len(self._axes[first])), range(len(self._axes[second]))
            for one, other in product(*numbers):
                pair = ((first, one), (second, other))
                if self.complete(dict(pair), {}) is not None:
                    yield pair

    def complete(
        self, chosen: dict[str, int], missing: Mapping[Pair, None]
    ) -> dict[str, int] | None:
        """A row that holds `chosen`; of the values of each other axis it takes the one that adds
        most of the missing pairs, of equals the one that was used least, and of those the first.

        Returns:
            The row, or None if there is none.
        """
        if not all(self._keeps_rules(chosen, axis) for axis in chosen):
            return None
        return self._extend(dict(chosen), missing)

    def _extend(
        self, chosen: dict[str, int], missing: Mapping[Pair, None]
    ) -> dict[str, int] | None:
        axis = next((axis for axis in self._order if axis not in chosen), None)
        if axis is None:
            return chosen

        def rank(number: int) -> tuple[int, int]:
            pairs = [self._pair(axis, number, other, chosen[other]) for other in chosen]
            added = sum(pair in missing for pair in pairs)
            return -added, self.used[axis, number]

        for number in sorted(range(len(self._axes[axis])), key=rank):
            longer = {**chosen, axis: number}
            if self._keeps_rules(longer, axis):
                row = self._extend(longer, missing)
                if row is not None:
                    return row
        return None

    def _keeps_rules(self, chosen: Mapping[str, int], axis: str) -> bool:
        """Whether no rule that reads `axis` is broken, as far as its axes are chosen."""
        for rule in self._rules_of[axis]:
            if set(rule.axes) <= chosen.keys():
                values = [self._axes[name][chosen[name]] for name in rule.axes]
                if not rule.holds(*values):
                    return False
        return True

    def _pair(self, axis: str, number: int, other: str, other_number: int) -> Pair:
        if self._places[axis] < self._places[other]:
            return (axis, number), (other, other_number)
        return (other, other_number), (axis, number)


def _priced(
    chosen: dict[str, int], axes: Mapping[str, Sequence[Any]], cost: str | None
) -> Iterator[tuple[dict[str, int], float]]:
    """The chosen values with each value of the axis `cost` that goes with them, and that value."""
    if cost is None:
        yield chosen, 1.0
        return
    for number, price in enumerate(axes[cost]):
        if chosen.get(cost, number) == number:
            yield {**chosen, cost: number}, price


def _pairs_of(row: Mapping[str, int], axes: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    yield from combinations([(axis, row[axis]) for axis in axes], 2)
