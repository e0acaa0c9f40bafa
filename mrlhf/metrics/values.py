"""How well values predict returns: over all tokens, by position in a response, by turn.

All tables are [batch, response_len], of the whole batch, so that no number depends on its split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.batch import Episode
from mrlhf.rl.masking import local_moments

PARTS = 4  # quarters of a response; turns of an episode, the last of which counts all later ones


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over `mask`; NaN if it is empty."""
    if not mask.any():
        return math.nan
    unexplained = local_moments(returns - values, mask).variance
    return 1 - unexplained / (local_moments(returns, mask).variance + 1e-5)


def value_metrics(
    prefix: str,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    episodes: Sequence[Episode] | None = None,
) -> dict[str, float]:
    """`<prefix>explained_var`, and for each part of the responses that has a token of the mask
    `<prefix>bias/<part>`, the mean of value - return, and where the returns differ also
    `<prefix>explained_var/<part>`.
    """
    metrics = {f"{prefix}explained_var": explained_variance(values, returns, mask)}
    parts = {"quarter": quarters(mask)}
    if episodes is not None:
        parts["turn"] = turns(episodes, mask)
    for kind, numbers in parts.items():
        for number in range(1, PARTS + 1):
            chosen = mask & (numbers == number)
            if not chosen.any():
                continue
            part = f"{kind}_{number}"
            metrics[f"{prefix}bias/{part}"] = local_moments(values - returns, chosen).mean
            lowest, highest = returns[chosen].aminmax()
            if lowest < highest:  # else there is nothing to explain
                variance = explained_variance(values, returns, chosen)
                metrics[f"{prefix}explained_var/{part}"] = variance
    return metrics


def quarters(mask: Tensor) -> Tensor:
    """The quarter in which each token of the mask lies, of its row's tokens of the mask."""
    return 1 + (mask.cumsum(dim=1) - 1) * PARTS // mask.sum(dim=1, keepdim=True).clamp(min=1)


def turns(episodes: Sequence[Episode], mask: Tensor) -> Tensor:
    """The turn in which each token lies, counted from 1."""
    numbers = torch.zeros_like(mask, dtype=torch.int64)
    for row, episode in enumerate(episodes):
        for number, begin in enumerate(episode.turn_begins, start=1):
            numbers[row, begin:] = min(number, PARTS)
    return numbers
