"""Chooses combinations in which every two choices that go together meet at least once.

With strength 1 each choice occurs at least once, with strength 3 every three meet, and so on.

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
Meeting = frozenset[Choice]
"""Choices of different axes that are to occur in one row; as many as the strength says."""

# For each new row, so many of the meetings that are still missing are tried as its beginning.
_ATTEMPTS = 48


@dataclass(frozen=True)
class Rule:
    """What must hold between values of some axes."""

    axes: tuple[str, ...]  # the axes
    holds: Callable[..., bool]  # takes a value of each, in this order


def covering_rows(
    axes: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule],
    cost: str | None = None,
    strength: int = 2,
    given: Sequence[Row] = (),
) -> list[Row]:
    """Rows that keep all rules and together hold every meeting of values that some such row holds.

    The same arguments always give the same rows. They cost little, though not the least.

    Args:
        axes: by name, the values to choose from.
        rules: those that name an axis which is not there are left out.
        cost: the axis whose value is the cost of a row; None: all rows cost the same.
        strength: how many values meet; 1: each value occurs.
        given: rows that are run anyway; what they hold is not asked of the others.
    """
    search = _Search(axes, [rule for rule in rules if set(rule.axes) <= axes.keys()], strength)
    missing = dict.fromkeys(search.feasible())
    for row in given:
        numbers = {axis: axes[axis].index(row[axis]) for axis in axes}
        for meeting in search.meetings(numbers):
            missing.pop(meeting, None)
    rows: list[Row] = []

    while missing:
        best: dict[str, int] = {}
        most = 0.0  # meetings that are still missing, for what a row costs
        for meeting in list(missing)[:_ATTEMPTS]:
            for chosen, price in _priced(dict(meeting), axes, cost):
                candidate = search.complete(chosen, missing)
                if candidate is None:
                    continue
                gain = sum(other in missing for other in search.meetings(candidate)) / price
                if gain > most:
                    best = candidate
                    most = gain
        for meeting in search.meetings(best):
            missing.pop(meeting, None)
        search.used.update(best.items())
        rows.append({axis: axes[axis][best[axis]] for axis in axes})
    return rows


class _Search:
    """Finds rows that keep the rules, axis by axis; values are known by their numbers.

    Attributes:
        used: how often each value has been chosen.
    """

    def __init__(
        self, axes: Mapping[str, Sequence[Any]], rules: Sequence[Rule], strength: int
    ) -> None:
        self._axes = axes
        self._strength = strength
        self._rules_of: dict[str, list[Rule]] = {axis: [] for axis in axes}
        for rule in rules:
            for axis in rule.axes:
                self._rules_of[axis].append(rule)
        self.used: Counter[Choice] = Counter()
        # Axes with many rules first: a dead end is then found early.
        self._order = sorted(axes, key=lambda axis: -len(self._rules_of[axis]))

    def feasible(self) -> Iterator[Meeting]:
        """All values of different axes that a row can hold together."""
        for axes in combinations(self._axes, self._strength):
            for numbers in product(*[range(len(self._axes[axis])) for axis in axes]):
                meeting = frozenset(zip(axes, numbers, strict=True))
                if self.complete(dict(meeting), {}) is not None:
                    yield meeting

    def meetings(self, row: Mapping[str, int]) -> Iterator[Meeting]:
        """All meetings of a row's values."""
        yield from map(frozenset, combinations(row.items(), self._strength))

    def complete(
        self, chosen: dict[str, int], missing: Mapping[Meeting, None]
    ) -> dict[str, int] | None:
        """A row that holds `chosen`; of the values of each other axis it takes the one that adds
        most of the missing meetings, of equals the one that was used least, and of those the first.

        Returns:
            The row, or None if there is none.
        """
        if not all(self._keeps_rules(chosen, axis) for axis in chosen):
            return None
        return self._extend(dict(chosen), missing)

    def _extend(
        self, chosen: dict[str, int], missing: Mapping[Meeting, None]
    ) -> dict[str, int] | None:
        axis = next((axis for axis in self._order if axis not in chosen), None)
        if axis is None:
            return chosen

        def rank(number: int) -> tuple[int, int]:
            added = 0
            for others in combinations(chosen.items(), self._strength - 1):
                added += frozenset([(axis, number), *others]) in missing
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
