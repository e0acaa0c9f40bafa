"""Refuses scores that training cannot use, and names the response and the number.

The advantage of a score must be finite in float32, and where the loss needs it, the reward must say
which responses are right. This file does not know how scores are made (`rewards` refuses those that
are too large by themselves), nor what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.errors import ConfigError, RewardError

_LONGEST_PROMPT = 40


def check_advantages(
    advantages: Tensor, returns: Tensor, shaped: Tensor, rollout: Rollout, estimator: str
) -> None:
    """Raise a RewardError for the first advantage or return that is not finite."""
    for what, table in (("an advantage", advantages), ("a return", returns)):
        rows = (~table.isfinite().all(dim=1)).nonzero()
        if len(rows):
            row = int(rows[0])
            raise RewardError(
                f"algorithm.adv_estimator {estimator} gives a token of {_response(rollout, row)}, "
                f"whose score is {float(shaped[row]):g}, {what} that is not a finite "
                "float32; the scores of the batch are too large, so make them smaller, for example "
                "by their weight in reward.terms"
            )


def check_correctness(correct: Sequence[float] | None, user: str) -> None:
    """Raise a ConfigError, which names the key `user`, if no term knows what is right."""
    if correct is None:
        raise ConfigError(
            f"{user} needs to know which responses are right, but no reward term has said so for "
            "any response of the batch; let your function return acc (0 or 1) beside its score, or "
            "add {name: exact_match, weight: 0} or gsm8k to reward.terms"
        )


def _response(rollout: Rollout, row: int) -> str:
    """The response in words: which sample of which prompt."""
    prompts = rollout.prompts
    text = " ".join(prompts.text[row].split())
    if len(text) > _LONGEST_PROMPT:
        text = f"{text[:_LONGEST_PROMPT]}..."
    number = rollout.sample_index[row] + 1
    return f"response {number} to prompt {prompts.uid[row]} ({text!r})"
