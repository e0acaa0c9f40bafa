"""The inputs and results of a reward, the same for built-in rules and for users' functions.

It knows no rule, no process and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mrlhf.errors import RewardError

Rule = Callable[[str, str, Any, Mapping[str, Any]], float | Mapping[str, Any]]
"""f(data_source, solution_str, ground_truth, extra_info) -> score, or a mapping with "score".

The mapping may also hold further numbers, the rightness of the response as "acc", and its answer as
"pred".
"""

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


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch; every list is [batch]."""

    scores: list[float]  # the weighted sum of the terms
    # each term's own score under the term's name, and its further numbers under "term/name"; NaN
    # where a response has no such number
    metrics: dict[str, list[float]]
    # for each term that extracts answers, the answers; None where there is none
    answers: dict[str, list[str | None]]


class Scored(NamedTuple):
    """The result of one term for one response; `answer` is None if the response has none."""

    score: float
    further: dict[str, float]
    answer: str | None = None


Evaluated = Mapping[str, Scored]
"""The results of the terms for one response, by the name of the term."""


def check_score(score: float, what: str) -> None:
    """Raise a RewardError if the score is not finite or too large; `what` names the score."""
    if not abs(score) <= LARGEST_SCORE:  # also where it is NaN
        raise RewardError(f"{what} {score:g}; {_WANTED}")


def split_score(value: Any, name: str) -> Scored:
    """Split a rule's return value into "score", the answer under "pred", and further numbers.

    Entries that are no numbers, or NaN, are left out.

    Raises:
        RewardError: there is no usable score, "acc" is not in 0..1, or another number is infinite.
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
        if key in ("score", "pred") or number is None:
            continue
        if key == "acc":
            _check_rightness(number, name)
        if isinstance(number, (int, float)) and not math.isnan(number):
            further[str(key)] = float(number)
            if math.isinf(number):
                raise RewardError(
                    f"{name} returned {number} as {key!r}; return a finite number, or leave it out"
                )
    answer = fields.get("pred")
    return Scored(float(score), further, None if answer is None else str(answer))


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
