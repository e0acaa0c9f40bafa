"""Statistics of a score within the rows of a batch that answer the same prompt.

Rows of one prompt group carry the same number. They may stand anywhere in the batch, and prompt
groups may differ in size. This file does not know what the scores mean.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

STD_EPS = 1e-6


class PromptGroups:
    """Rows of a batch by the prompt that they answer; every row is given the figure of its group.

    Attributes:
        size: int64 [batch], rows in the prompt group of each row.
        single: bool [batch], whether a row is alone in its prompt group.
    """

    def __init__(self, prompt_groups: Tensor) -> None:
        assert prompt_groups.dim() == 1, f"one number a row, not {tuple(prompt_groups.shape)}"
        unique, self._index, sizes = prompt_groups.unique(return_inverse=True, return_counts=True)
        self._count = unique.numel()
        self.size = sizes[self._index]
        self.single = self.size == 1

    def total(self, x: Tensor) -> Tensor:
        """Sum of `x` [batch, ...] over the rows of each row's prompt group, [batch, ...]."""
        self._check_rows(x)
        empty = x.new_zeros(self._count, *x.shape[1:])
        return empty.index_add(0, self._index, x)[self._index]

    def lowest(self, x: Tensor) -> Tensor:
        """Smallest `x` [batch] of each row's prompt group, [batch]."""
        return self._extreme(x, "amin")

    def highest(self, x: Tensor) -> Tensor:
        """Largest `x` [batch] of each row's prompt group, [batch]."""
        return self._extreme(x, "amax")

    def centred(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """Each score less the mean of its prompt group, float64 [batch]; a row alone keeps its
        score.

        `weights` [batch], at least 0, are those of the rows in the mean; None: all alike. Where all
        weights of a prompt group are 0, its lowest score stands for the mean.
        """
        scores = scores.double()
        # Sums are taken of the distance to the lowest score: scores with a large common offset lose
        # no digits, and equal scores are exactly at their mean.
        above = scores - self.lowest(scores)

        weights = torch.ones_like(above) if weights is None else weights.double()
        weight = self.total(weights)
        mean = torch.where(weight > 0, self.total(above * weights) / weight, 0)

        return torch.where(self.single, scores, above - mean)

    def std(self, centred: Tensor) -> Tensor:
        """Unbiased standard deviation, 1 for a row alone, of scores less their mean; float64."""
        deviation = (self.total(centred.square()) / (self.size - 1)).sqrt()
        return torch.where(self.single, 1, deviation)

    def _extreme(self, x: Tensor, reduction: Literal["amin", "amax"]) -> Tensor:
        self._check_rows(x)
        empty = x.new_zeros(self._count)
        reduced = empty.scatter_reduce(0, self._index, x, reduction, include_self=False)
        return reduced[self._index]

    def _check_rows(self, x: Tensor) -> None:
        assert x.shape[:1] == self._index.shape, (
            f"{tuple(x.shape)} against {tuple(self._index.shape)} rows"
        )


def standardise_by_prompt(scores: Tensor, by_prompt: PromptGroups) -> Tensor:
    """(score - group's mean) / (its unbiased std + 1e-6), float64 [batch]."""
    centred = by_prompt.centred(scores)
    return centred / (by_prompt.std(centred) + STD_EPS)
