"""Statistics of a score within the rows of a batch that answer the same prompt.

Rows of one group carry the same number; they may stand anywhere in the batch, and groups may differ
in size. This file does not know what the scores mean.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

STD_EPS = 1e-6


class PromptGroups:
    """Rows of a batch by the prompt that they answer; each reduction hands every row the figure of
    its group.

    Sums are taken in float64 and after the lowest score of the group is taken off, so that scores
    with a large common offset lose no digits, and equal scores are exactly at their mean.

    Attributes:
        size: int64 [batch], rows in the group of each row.
        single: bool [batch], whether a row is alone in its group.
    """

    def __init__(self, groups: Tensor) -> None:
        assert groups.dim() == 1, f"one group number a row, not {tuple(groups.shape)}"
        unique, self._index, sizes = groups.unique(return_inverse=True, return_counts=True)
        self._count = unique.numel()
        self.size = sizes[self._index]
        self.single = self.size == 1

    def total(self, x: Tensor) -> Tensor:
        """Sum of `x` [batch] over each row's group, [batch]."""
        assert x.shape == self._index.shape, (
            f"{tuple(x.shape)} against {tuple(self._index.shape)} rows"
        )
        return x.new_zeros(self._count).index_add(0, self._index, x)[self._index]

    def lowest(self, x: Tensor) -> Tensor:
        """Smallest `x` [batch] of each row's group, [batch]."""
        return self._extreme(x, "amin")

    def highest(self, x: Tensor) -> Tensor:
        """Largest `x` [batch] of each row's group, [batch]."""
        return self._extreme(x, "amax")

    def centred(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """Each score less the mean of its group; a row alone keeps its score.

        Args:
            scores: [batch].
            weights: [batch], at least 0, of each row in the mean; None counts rows alike. Where a
                group's are all 0, its lowest score stands for the mean.

        Returns:
            float64 [batch]
        """
        scores = scores.double()
        above = scores - self.lowest(scores)
        weights = torch.ones_like(above) if weights is None else weights.double()
        weight = self.total(weights)
        mean = torch.where(weight > 0, self.total(above * weights) / weight, 0)
        return torch.where(self.single, scores, above - mean)

    def std(self, centred: Tensor) -> Tensor:
        """Unbiased standard deviation of each row's group, 1 for a row alone.

        Args:
            centred: float64 [batch], scores less the mean of their group.

        Returns:
            float64 [batch]
        """
        deviation = (self.total(centred.square()) / (self.size - 1)).sqrt()
        return torch.where(self.single, 1, deviation)

    def _extreme(self, x: Tensor, reduction: Literal["amin", "amax"]) -> Tensor:
        assert x.shape == self._index.shape, (
            f"{tuple(x.shape)} against {tuple(self._index.shape)} rows"
        )
        reduced = x.new_zeros(self._count).scatter_reduce(
            0, self._index, x, reduction, include_self=False
        )
        return reduced[self._index]


def standardise_in_groups(scores: Tensor, groups: PromptGroups) -> Tensor:
    """(score - group mean) / (unbiased group std + 1e-6), float64 [batch]; a row alone: mean 0, std
    1.
    """
    centred = groups.centred(scores)
    return centred / (groups.std(centred) + STD_EPS)
