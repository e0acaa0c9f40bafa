"""The chosen combinations keep the rules and hold every pair that the full product holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import Row, Rule, covering_rows
from tests.dist.invariance_axes import AXES, RULES, few_rows, more_rows

SWITCHES = {"a": (False, True), "b": (False, True), "c": (False, True)}
SIZES = {"ranks": (4, 8), "tp": (1, 2, 4), "pp": (1, 2, 4), "dp": (1, 2, 4), "deep": (False, True)}
FILLS = Rule(("ranks", "tp", "pp", "dp"), lambda ranks, *sizes: math.prod(sizes) == ranks)
DEEP = Rule(("deep", "pp"), lambda deep, pp: not deep or pp > 1)
NOBODY = Rule(("deep", "absent"), lambda deep, absent: False)
CASES = {
    "no rule": (SWITCHES, []),
    "one allows the other": (SWITCHES, [Rule(("a", "b"), lambda a, b: a or not b)]),
    "a product": (SIZES, [FILLS, DEEP]),
    "a rule of an axis that is not there": (SIZES, [FILLS, NOBODY]),
    "one value": ({"a": (1, 2, 3), "b": ("x",)}, []),
}


def _product(axes: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> list[Row]:
    """All combinations that keep the rules."""
    present = [rule for rule in rules if set(rule.axes) <= axes.keys()]
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [row for row in rows if _keeps(row, present)]


def _keeps(row: Row, rules: Sequence[Rule]) -> bool:
    return all(rule.holds(*[row[axis] for axis in rule.axes]) for rule in rules)


def _pairs(rows: Sequence[Row], strength: int = 2) -> set[Any]:
    return {pair for row in rows for pair in combinations(row.items(), strength)}


@pytest.mark.parametrize("case", CASES)
def test_every_pair_of_the_product_occurs(case: str) -> None:
    axes, rules = CASES[case]
    whole = _product(axes, rules)
    rows = covering_rows(axes, rules)
    assert all(row in whole for row in rows)
    assert _pairs(rows) == _pairs(whole)
    assert len(rows) < len(whole) or len(rows) == len(_pairs(whole))


def test_three_switches_need_four_rows() -> None:
    assert covering_rows(SWITCHES, []) == [
        {"a": False, "b": False, "c": False},
        {"a": False, "b": True, "c": True},
        {"a": True, "b": False, "c": True},
        {"a": True, "b": True, "c": False},
    ]


def test_rows_that_cost_less_come_instead_of_dearer_ones() -> None:
    rows = covering_rows(SIZES, [FILLS, DEEP])
    cheap = covering_rows(SIZES, [FILLS, DEEP], cost="ranks")
    assert _pairs(cheap) == _pairs(rows)
    assert sum(row["ranks"] for row in cheap) < sum(row["ranks"] for row in rows)


@pytest.mark.parametrize("strength", [1, 3])
@pytest.mark.parametrize("case", ["one allows the other", "a product"])
def test_strength_says_how_many_values_meet(case: str, strength: int) -> None:
    axes, rules = CASES[case]
    rows = covering_rows(axes, rules, strength=strength)
    assert _pairs(rows, strength) == _pairs(_product(axes, rules), strength)
    assert len(rows) <= len(_pairs(rows, strength))


def test_what_given_rows_hold_is_not_asked_again() -> None:
    given = covering_rows(SIZES, [FILLS, DEEP], strength=1)
    rows = covering_rows(SIZES, [FILLS, DEEP], given=given)
    assert _pairs([*given, *rows]) == _pairs(_product(SIZES, [FILLS, DEEP]))
    assert not [row for row in rows if row in given]
    assert covering_rows(SIZES, [FILLS, DEEP], given=[*given, *rows]) == []


def test_the_same_rows_each_time() -> None:
    assert covering_rows(SIZES, [FILLS, DEEP]) == covering_rows(SIZES, [FILLS, DEEP])


def test_the_rows_of_the_invariance_matrix_are_few() -> None:
    few = few_rows()
    rows = [*few, *more_rows(few)]
    assert len(few) < 12 and {row["ranks"] for row in few} == {4}
    assert all(
        _keeps(row, [rule for rule in RULES if set(rule.axes) <= AXES.keys()]) for row in rows
    )
    for axis, values in AXES.items():
        assert {row[axis] for row in rows} == set(values), axis
    assert len(rows) < 62
    assert sum(row["ranks"] for row in rows) < 310
