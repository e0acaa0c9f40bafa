"""The inputs and results of a reward, the same for built-in rules and for users' functions.

It knows no rule, no process and no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mrlhf.errors import RewardError

__all__ = ["RewardInput", "RewardResult", "Rule", "Scored", "split_score"]

Rule = Callable[[str, str, str, Mapping[str, Any]], float | Mapping[str, Any]]
"""f(data_source, solution_str, ground_truth, extra_info) -> score, or a mapping with "score".

The mapping may also hold further numbers and, as "pred", the answer of the response.
"""


@dataclass(frozen=True)
class RewardInput:
    """One response to score.

    Attributes:
        data_source: name of the data set that holds the prompt.
        prompt_text: the prompt as the model saw it.
        solution_str: the response as text, special tokens left out.
        ground_truth: the reference answer.
        extra_info: the rest of the prompt's row.
        response_tokens: number of tokens of the response, stop token included.
    """

    data_source: str
    prompt_text: str
    solution_str: str
    ground_truth: str
    extra_info: Mapping[str, Any]
    response_tokens: int

    def extra(self) -> dict[str, Any]:
        """The extra_info that a rule gets: the row's, `prompt_text` and `response_tokens`."""
        return {
            **self.extra_info,
            "prompt_text": self.prompt_text,
            "response_tokens": self.response_tokens,
        }


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch.

    Attributes:
        scores: the weighted mix, one number a response [batch].
        metrics: each term's own score under the term's name, and its further numbers under
            "term/name" [batch]; NaN where a response has no such number.
        answers: under the name of each term that extracts answers, the extracted answers [batch];
            None where a response has no answer.
    """

    scores: list[float]
    metrics: dict[str, list[float]]
    answers: dict[str, list[str | None]]


class Scored(NamedTuple):
    """The result of one term for one response.

    Attributes:
        score: the reward.
        further: further numbers, by name.
        answer: the answer extracted from the response; None where there is none.
    """

    score: float
    further: dict[str, float]
    answer: str | None = None


def split_score(value: Any, name: str) -> Scored:
    """The parts of a rule's return value: "score", the answer under "pred", and further numbers.

    Everything else is left out.

    Raises:
        RewardError: there is no finite score.
    """
    fields = value if isinstance(value, Mapping) else {"score": value}

    if "score" not in fields:
        raise RewardError(
            f'reward {name} returned a dict without "score": {sorted(map(str, fields))}'
        )
    score = fields["score"]
    if not isinstance(score, (int, float)):
        raise RewardError(
            f"reward {name} returned {str(score)[:200]!r}, which is no number; return a finite "
            "float"
        )
    if not math.isfinite(score):
        raise RewardError(f"reward {name} returned {score}; return a finite float")

    further = {}
    for key, number in fields.items():
        if key not in ("score", "pred") and isinstance(number, (int, float)):
            further[str(key)] = float(number)
    answer = fields.get("pred")
    return Scored(float(score), further, None if answer is None else str(answer))
