"""Reads the reference answer of a row.

It knows the types that an answer may have. It does not know how a response is compared with it:
that is in the rules that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from mrlhf.data.rows import Row
from mrlhf.errors import DataError

# For each rule that compares a response with the answer, by name: whether any response is right. If
# it is empty, rows need no answer.
AnswerRules = Mapping[str, Callable[[str], bool]]


def reference_answer(row: Row, rules: AnswerRules) -> Any:
    """The reference answer: text for a string or a number; None if the row has none.

    It stands under `answer`, or under `ground_truth` in verl's `reward_model`. A number with no
    fraction is written without one, since files often hold 18 as 18.0. Without rules, a boolean, a
    list and an object are returned as they are.

    Raises:
        DataError: a rule needs an answer and there is none, or it is of a type that cannot be used.
    """
    key, value = _find(row)
    rule = next(iter(rules), None)
    if value is None:
        if rule is None:
            return None
        raise DataError(
            f"{row.where}: no value for {key!r}, with which {rule} compares the response; the row "
            f"has {sorted(row.fields)}"
        )

    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        return _number_as_text(row, key, value)
    if rule is not None and not isinstance(value, str):
        raise DataError(
            f"{row.where}: {key!r} is {_shown(value)}, but {rule} compares the response with "
            "text; give a string or a number, or use a reward function of your own"
        )
    if rule is not None and not value.strip():
        raise DataError(
            f"{row.where}: {key!r} is empty, but {rule} compares the response with it; give the "
            "answer, or remove the row"
        )

    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{row.where}: {key!r} is {_shown(value)}, which cannot be handed to a reward function "
            f"({error}); use text, finite numbers, lists and objects"
        ) from None
    return value


def _find(row: Row) -> tuple[str, Any]:
    """The key of the row's answer, and its value; None if there is none."""
    section = row.fields.get("reward_model")
    if section is None:
        return "answer", row.fields.get("answer")
    if not isinstance(section, dict):
        raise DataError(
            f'{row.where}: "reward_model" must be an object with a "ground_truth", found '
            f"{type(section).__name__}"
        )
    return "reward_model.ground_truth", section.get("ground_truth")


def _number_as_text(row: Row, key: str, value: float | Decimal) -> str:
    number = Decimal(str(value))
    if not number.is_finite():
        raise DataError(
            f"{row.where}: {key!r} is {value}, which is no answer; give a finite number or text"
        )
    return str(int(number)) if number == int(number) else format(number, "f")


def _shown(value: Any) -> str:
    """The type and the value, for messages."""
    name = {"bool": "a boolean", "list": "a list", "dict": "an object"}.get(
        type(value).__name__, f"of type {type(value).__name__}"
    )
    return f"{name} ({str(value)[:60]})"
