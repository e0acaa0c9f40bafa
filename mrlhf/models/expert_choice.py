"""Chooses the experts of a mixture for each token, from the token's scores.

Pure functions of tensors, for the router in training and the one of the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.models.spec import Experts

SMALLEST_SUM = 1e-20  # scores that are all 0 must not become NaN


def chosen_experts(scores: Tensor, correction: Tensor | None, experts: Experts) -> Tensor:
    """Return the chosen experts, int64 [tokens, per_token].

    `scores` are float32 [tokens, experts]; `correction` [experts] counts for the choice alone.
    """
    if correction is not None:
        scores = scores + correction
    if experts.groups > 1:
        scores = _of_best_groups(scores, experts)
    return scores.topk(experts.per_token, dim=-1).indices


def occurrences(numbers: Tensor, size: int) -> Tensor:
    """Return how often each of 0 to `size` - 1 occurs, int64 [size]."""
    flat = numbers.flatten()
    # `Tensor.bincount` would ask a GPU for the largest number.
    return flat.new_zeros(size).index_add_(0, flat, torch.ones_like(flat))


def _of_best_groups(scores: Tensor, experts: Experts) -> Tensor:
    """Set scores outside the groups with the best sums of two scores to -inf, token by token."""
    by_group = scores.unflatten(-1, (experts.groups, -1))
    goodness = by_group.topk(2, dim=-1).values.sum(dim=-1)
    best = goodness.topk(experts.groups_per_token, dim=-1).indices

    is_left_out = torch.ones_like(goodness, dtype=torch.bool).scatter(-1, best, False)
    return by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(-2)
