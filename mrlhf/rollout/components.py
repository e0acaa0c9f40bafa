"""Finds the scores of single terms of the reward, for estimators that compare them one by one.

It does not know what an estimator makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.errors import RewardError
from mrlhf.rollout.scoring import Scores

KEY = "algorithm.gdpo_reward_keys"


def reward_components(
    scores: Scores, rollout: Rollout, keys: Sequence[str] | None
) -> tuple[list[str], Tensor]:
    """The scores that are compared one by one.

    Args:
        scores: all scores of the batch.
        rollout: the responses.
        keys: names of scores as `Scores.terms` has them; a number that a user's function reports
            may be named without the function. None: the scores of all terms.

    Returns:
        The full names, and float64 [names, batch].

    Raises:
        RewardError: no score or more than one has such a name, or a response has no finite score.
    """
    if keys is None:
        names = [name for name in scores.terms if "/" not in name]
    else:
        names = [_full_name(key, scores.terms) for key in keys]

    for name in names:
        for row, number in enumerate(scores.terms[name]):
            if not math.isfinite(number):
                raise RewardError(
                    f"{KEY}: {name} is {number} for a response to prompt "
                    f"{rollout.prompts.uid[row]}; gdpo compares this score, so every response "
                    "must have one"
                )
    return names, torch.tensor([scores.terms[name] for name in names], dtype=torch.float64)


def component_metrics(names: Sequence[str], components: Tensor) -> dict[str, float]:
    """`gdpo/<name>/mean`, `std`, `max` and `min` of each row of `components` [names, batch].

    The standard deviation is that of the batch itself, not an estimate, as in verl.
    """
    metrics = {}
    for name, scores in zip(names, components, strict=True):
        metrics[f"gdpo/{name}/mean"] = float(scores.mean())
        metrics[f"gdpo/{name}/std"] = float(scores.std(correction=0))
        metrics[f"gdpo/{name}/max"] = float(scores.max())
        metrics[f"gdpo/{name}/min"] = float(scores.min())
    return metrics


def _full_name(key: str, terms: Mapping[str, Sequence[float]]) -> str:
    """The name in `terms` that `key` stands for."""
    if key in terms:
        return key
    found = [name for name in terms if name.endswith(f"/{key}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise RewardError(f"{KEY}: {key} may be any of {', '.join(found)}; give the full name")
    raise RewardError(
        f"{KEY}: no response has a score named {key}; those reported are {', '.join(terms)}"
    )
