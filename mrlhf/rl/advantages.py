"""From rewards and values to advantages and returns.

Advantages leave this file as they are: whitening needs the moments of the whole batch and is the caller's second step.
This file does not know how the rewards were made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

AdvantageEstimator = Literal["gae"]
Estimator = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, https://arxiv.org/abs/1506.02438.

    A masked-out position is skipped: the value and the advantage after it are handed unchanged to the one before it.
    After the last position both are 0, for a response ends the episode, whether it stopped or was cut.

    Args:
        rewards: [batch, response_len], reward of each token.
        values: [batch, response_len], the critic's prediction before each token.
        mask: bool [batch, response_len].
        gamma: discount.
        lam: 0 trusts the critic after one token, 1 trusts the rewards alone.

    Returns:
        Advantages and returns (advantage + value), both [batch, response_len], 0 where the mask is.
    """
    assert rewards.shape == values.shape == mask.shape, f"{rewards.shape}, {values.shape}, {mask.shape}"
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"
    next_value = torch.zeros_like(values[:, 0])
    last = torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        valid = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = torch.where(valid, delta + gamma * lam * last, last)
        next_value = torch.where(valid, values[:, t], next_value)
        advantages[:, t] = torch.where(valid, last, 0)
    returns = torch.where(mask, advantages + values, 0)
    return advantages, returns


ADVANTAGE_ESTIMATORS: dict[AdvantageEstimator, Estimator] = {"gae": gae}
