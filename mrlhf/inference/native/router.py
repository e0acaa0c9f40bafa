"""The router of a mixture: which experts each token goes to, and what their outputs count.

It computes in float32 whatever the model's dtype is: rounded scores would choose other experts.
This file knows no experts and no ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.inference.native.linear import linear
from mrlhf.models.spec import Experts

_SMALLEST_SUM = 1e-20  # scores that are all 0 must not become NaN


class Router:
    """The router of one layer."""

    def __init__(self, experts: Experts, weight: Tensor, correction: Tensor | None) -> None:
        """Lay the weight out.

        Args:
            experts: how experts are chosen.
            weight: [experts, hidden].
            correction: what is added to the scores for the choice, [experts], if anything is.
        """
        self._experts = experts
        self._logits = linear(weight.float())
        self._correction = None if correction is None else correction.float()

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their shares.

        Args:
            hidden: [tokens, hidden].

        Returns:
            The numbers of the experts, int64 [tokens, per_token], and what the output of each is
            multiplied by, float32 [tokens, per_token].
        """
        experts = self._experts
        logits = self._logits(hidden.float())
        scores = logits.softmax(dim=-1) if experts.scoring == "softmax" else logits.sigmoid()

        rank_by = scores if self._correction is None else scores + self._correction
        if experts.groups > 1:
            rank_by = _of_best_groups(rank_by, experts)
        chosen = rank_by.topk(experts.per_token, dim=-1).indices

        shares = scores.gather(-1, chosen)
        if experts.normalised:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
        return chosen, shares if experts.scale == 1.0 else shares * experts.scale


def _of_best_groups(scores: Tensor, experts: Experts) -> Tensor:
    """The scores [tokens, experts] with -inf for the experts outside of each token's best groups.

    A group is as good as the sum of its two best scores.
    """
    by_group = scores.unflatten(-1, (experts.groups, -1))
    goodness = by_group.topk(2, dim=-1).values.sum(dim=-1)
    best = goodness.topk(experts.groups_per_token, dim=-1).indices

    is_left_out = torch.ones_like(goodness, dtype=torch.bool).scatter(-1, best, False)
    return by_group.masked_fill(is_left_out[..., None], -float("inf")).flatten(-2)
