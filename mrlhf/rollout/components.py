"""Finds the scores of single terms of the reward, for estimators that compare them one by one.

It does not know what an estimator makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.config.reward import RewardSection
from mrlhf.errors import RewardError
from mrlhf.rewards.term_names import term_names
from mrlhf.rollout.scoring import Scores

KEY = "algorithm.gdpo_reward_keys"
# the name of the sum of the rewards of an episode's turns, and of those placed on tokens
TURN_REWARDS = "turn_rewards"


@dataclass(frozen=True)
class RewardComponents:
    """The scores that are compared one by one."""

    names: tuple[str, ...]  # their full names
    weights: tuple[float, ...]  # the weight of each
    scores: Tensor  # float64 [names, batch]

    def metrics(self) -> dict[str, float]:
        """`gdpo/<name>/mean`, `std`, `max` and `min` of each; the std is the batch's own."""
        metrics = {}
        for name, scores in zip(self.names, self.scores, strict=True):
            metrics[f"gdpo/{name}/mean"] = float(scores.mean())
            metrics[f"gdpo/{name}/std"] = float(scores.std(correction=0))
            metrics[f"gdpo/{name}/max"] = float(scores.max())
            metrics[f"gdpo/{name}/min"] = float(scores.min())
        return metrics


def reward_components(
    scores: Scores, rollout: Rollout, algorithm: AlgorithmSection, reward: RewardSection
) -> RewardComponents:
    """The scores that the configuration compares.

    `algorithm.gdpo_reward_keys` names them as `Scores.terms` does; a number that a user's function
    reports may be named without the function. Without keys they are the terms of the reward whose
    weight is not 0. The sum of a response's turn rewards, and of the values that terms have placed
    on its tokens, is a score too, compared with the weight 1 if there are no keys.

    Raises:
        RewardError: no score or more than one has such a name, or a response has no finite score.
    """
    keys = algorithm.gdpo_reward_keys
    terms = dict(scores.terms)
    if rollout.episodes is not None or rollout.placed is not None:
        terms[TURN_REWARDS] = rollout.with_turn_rewards(torch.zeros(len(rollout))).tolist()

    if keys is None:
        every = term_names([term.name for term in reward.terms])
        weight_of = dict(zip(every, (term.weight for term in reward.terms), strict=True))
        names = [name for name, weight in weight_of.items() if weight]
        weights = [weight_of[name] for name in names]
        if any(terms.get(TURN_REWARDS, ())):
            names.append(TURN_REWARDS)
            weights.append(1.0)
    else:
        names = [_full_name(key, terms) for key in keys]
        weights = algorithm.gdpo_reward_weights or [1.0] * len(names)

    for name in names:
        for row, number in enumerate(terms[name]):
            if not math.isfinite(number):
                raise RewardError(
                    f"{KEY}: {name} is {number} for a response to prompt "
                    f"{rollout.prompts.uid[row]}; gdpo compares this score, so every response "
                    "must have one"
                )
    table = torch.tensor([terms[name] for name in names], dtype=torch.float64)
    return RewardComponents(tuple(names), tuple(weights), table)


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
