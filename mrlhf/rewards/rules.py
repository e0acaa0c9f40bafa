"""Built-in reward rules: pure functions of a response and its reference answer.

A user's reward file may import them and build on them. This file does not know tokens, models or
how terms are weighted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mrlhf.rewards.interface import Rule

FORMAT_PATTERN = r"(?s)\A(?:(?!####).)*(?<![^\n])#### -?\$?\d[\d,]*(?:\.\d+)?\s*\Z"
"""One "#### number" line, and nothing after it."""

_CLIP_CHARACTERS = 300
_STRICT = re.compile(r"#### (-?\$?-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?\$?[0-9.,]+")


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    """1 where the response is the reference answer, apart from whitespace around it."""
    return float(solution_str.strip() == ground_truth.strip())


def gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    """1 where the last "#### number" is the reference answer.

    This is verl's `gsm8k.compute_score(method="strict")`, more lenient in two points: a dollar sign
    before the number and a full stop after it are ignored.
    """
    return float(extract_number(solution_str, strict=True) == _normalise(ground_truth))


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    """1 where the last number of the response, in any form ("A: 18"), is the reference answer.

    This is verl's `method="flexible"`, but "1,000", "$18" and "18." are read as 1000 and 18.
    """
    return float(extract_number(solution_str, strict=False) == _normalise(ground_truth))


def format_match(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    pattern: str = FORMAT_PATTERN,
) -> float:
    """1 where the regular expression `pattern` is found in the response."""
    return float(re.search(pattern, solution_str) is not None)


def extract_number(solution: str, *, strict: bool) -> str | None:
    """The number that a solution gives as its answer; None without one.

    With `strict` the number must follow "#### "; otherwise the last number of all counts. Thousands
    separators and dollar signs are removed. As in verl, only the last 300 characters are searched,
    and numbers are compared as text: "18.0" is not "18".
    """
    pattern = _STRICT if strict else _FLEXIBLE
    for match in reversed(pattern.findall(solution[-_CLIP_CHARACTERS:])):
        number = _normalise(match)
        if any(character.isdigit() for character in number):
            return number
    return None


def _normalise(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").rstrip(".")


RULES: dict[str, Rule] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "format": format_match,
}

ANSWERS: dict[str, Callable[[str], str | None]] = {
    "exact_match": str.strip,
    "gsm8k": partial(extract_number, strict=True),
    "gsm8k_flexible": partial(extract_number, strict=False),
}
"""How the rules that compare an answer extract it from the response."""


def answer_rules(terms: Iterable[str]) -> dict[str, Callable[[str], bool]]:
    """For each rule of `terms`: whether it finds any response right for a reference answer."""
    return {name: partial(_can_be_right, RULES[name]) for name in terms if name in ANSWERS}


def _can_be_right(rule: Rule, ground_truth: str) -> bool:
    likely_responses = (ground_truth, f"#### {ground_truth}")
    return any(rule("", response, ground_truth, {}) == 1 for response in likely_responses)
