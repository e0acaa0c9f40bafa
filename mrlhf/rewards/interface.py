"""The inputs and results of a reward, the same for built-in rules and for users' functions.

It knows no rule, no process and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mrlhf.errors import RewardError

Rule = Callable[[str, str, Any, Mapping[str, Any]], float | Mapping[str, Any]]
"""f(data_source, solution_str, ground_truth, extra_info) -> score, or a mapping with "score".

The mapping may also hold further numbers, the rightness of the response as "acc", its answer as
"pred", and values at places of the response under the keys of `POSITIONS`.
"""

Unit = Literal["token", "character"]
POSITIONS: Mapping[str, Unit] = {"token_positions": "token", "character_positions": "character"}
"""The keys of lists of pairs (place, value), and what a place counts, from 0."""

_SHOWN_CHARACTERS = 200
LARGEST_SCORE = 1e15
"""Sums of squares of such scores, which advantages need, are finite in float32."""

_WANTED = (
    f"return a finite number from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}, or a dict with such a "
    'number as "score"'
)


@dataclass(frozen=True)
class RewardInput:
    """One response to score."""

    data_source: str  # name of the data set that holds the prompt
    prompt_text: str  # the prompt as the model saw it
    solution_str: str  # the response as text, special tokens left out
    ground_truth: Any  # the reference answer, as text if a rule compares with it; None without one
    extra_info: Mapping[str, Any]  # the rest of the prompt's row, with its `split` and `index`
    response_tokens: int  # number of tokens of the response, stop token included

    @property
    def title(self) -> str:
        """The response and the row of its prompt, for messages."""
        parts = [
            f"data_source {self.data_source!r}",
            f"solution {self.solution_str[:_SHOWN_CHARACTERS]!r}",
            f"prompt {self.prompt_text[-_SHOWN_CHARACTERS:]!r}",
        ]
        if "index" in self.extra_info:
            split = self.extra_info.get("split")
            parts.append(f"index {self.extra_info['index']} of split {split!r}")
        return ", ".join(parts)

    def extra(self) -> dict[str, Any]:
        """The extra_info that a rule gets: the row's, `prompt_text` and `response_tokens`."""
        return {
            **self.extra_info,
            "prompt_text": self.prompt_text,
            "response_tokens": self.response_tokens,
        }


class PlacedValue(NamedTuple):
    """A reward of one place of a response."""

    unit: Unit
    place: int  # of a token among those of the response, or of a character in `solution_str`
    value: float


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch; every list is [batch]."""

    scores: list[float]  # the weighted sum of the terms
    # each term's own score under the term's name, and its further numbers under "term/name"; NaN
    # where a response has no such number
    metrics: dict[str, list[float]]
    # for each term that extracts answers, the answers; None where there is none
    answers: dict[str, list[str | None]]
    placed: list[list[PlacedValue]]  # the weighted values of all terms


class Scored(NamedTuple):
    """The result of one term for one response; `answer` is None if the response has none."""

    score: float
    further: dict[str, float]
    answer: str | None = None
    placed: tuple[PlacedValue, ...] = ()


Evaluated = Mapping[str, Scored]
"""The results of the terms for one response, by the name of the term."""


def check_score(score: float, what: str) -> None:
    """Raise a RewardError if the score is not finite or too large; `what` names the score."""
    if not abs(score) <= LARGEST_SCORE:  # also where it is NaN
        raise RewardError(f"{what} {score:g}; {_WANTED}")


def split_score(value: Any, name: str) -> Scored:
    """Split a rule's return value into "score", the answer under "pred", and further numbers.

    Entries that are no numbers, or NaN, are left out. Values at places are read, and their sum is
    the further number "placed".

    Raises:
        RewardError: there is no usable score, "acc" is not in 0..1, another number is infinite, or
            positions are no pairs of a place and a number.
    """
    fields = value if isinstance(value, Mapping) else {"score": value}
    if "score" not in fields:
        found = sorted(map(str, fields))
        raise RewardError(f'{name} returned a dict without "score" (it has {found}); {_WANTED}')

    score = fields["score"]
    if not isinstance(score, (int, float)):
        raise RewardError(f"{name} returned {_shown(score)}, which is no number; {_WANTED}")
    check_score(score, f"{name} returned")

    further = {}
    for key, number in fields.items():
        if key in ("score", "pred", *POSITIONS) or number is None:
            continue
        if key == "positions" and not isinstance(number, (int, float)):
            raise RewardError(
                f"{name} returned 'positions', which does not say what a place counts; name it "
                f"{' or '.join(POSITIONS)}"
            )
        if key == "acc":
            _check_rightness(number, name)
        if isinstance(number, (int, float)) and not math.isnan(number):
            further[str(key)] = float(number)
            if math.isinf(number):
                raise RewardError(
                    f"{name} returned {number} as {key!r}; return a finite number, or leave it out"
                )
    placed = _placed(fields, name)
    if placed:
        further["placed"] = math.fsum(value for _, _, value in placed)
    answer = fields.get("pred")
    return Scored(float(score), further, None if answer is None else str(answer), placed)


def check_places(placed: Sequence[PlacedValue], row: RewardInput, name: str) -> None:
    """Raise a RewardError for a place that the response does not have."""
    lengths = {"token": row.response_tokens, "character": len(row.solution_str)}
    for unit, place, _ in placed:
        if not 0 <= place < lengths[unit]:
            raise RewardError(
                f"{name} placed a value at {unit} {place} of a response of {lengths[unit]} "
                f"{unit}s; places count from 0"
            )


def _placed(fields: Mapping[str, Any], name: str) -> tuple[PlacedValue, ...]:
    placed = []
    for key, unit in POSITIONS.items():
        pairs = fields.get(key) or ()
        if not (isinstance(pairs, (list, tuple)) and all(map(_is_pair, pairs))):
            raise RewardError(
                f"{name} returned {_shown(pairs)} as {key!r}; return a list of pairs of a place, "
                "which is a whole number, and a value"
            )
        for place, value in pairs:
            check_score(value, f"{name} returned at place {place:g} of {key!r}")
            placed.append(PlacedValue(unit, int(place), float(value)))
    return tuple(placed)


def _is_pair(pair: Any) -> bool:
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    return is_pair and all(isinstance(x, (int, float)) for x in pair) and pair[0] % 1 == 0


def _check_rightness(number: Any, name: str) -> None:
    if not (isinstance(number, (int, float)) and 0 <= number <= 1):
        raise RewardError(
            f"{name} returned {_shown(number)} as 'acc', which says whether the response is right; "
            "return 1 or True if it is, 0 or False if not, or a number between"
        )


def _shown(value: Any) -> str:
    """The value as Python writes it, on one line."""
    words = value if isinstance(value, str) else repr(value)
    return " ".join(words.split())[:_SHOWN_CHARACTERS]
