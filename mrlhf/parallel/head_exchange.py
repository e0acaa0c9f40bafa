"""Gives each context-parallel rank all tokens of some heads, in place of some tokens of all heads.

For layers that go through the tokens of a sequence one after the other. This file knows no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


@dataclass(frozen=True)
class HeadExchange:
    """The exchange of one pack, the same for all layers."""

    group: dist.ProcessGroup  # the ranks that share the sequences
    # int64 [whole], all tokens in order but for padding behind a part, as their places among the
    # tokens of all ranks, one rank after the other.
    places: Tensor

    def share(self, weight: Tensor, sizes: list[int]) -> Tensor:
        """This rank's share of each part of a weight [rows, ...], whose parts have these sizes."""
        parts = weight.split(sizes)
        ranks = self.group.size()
        return torch.cat([part.chunk(ranks)[self.group.rank()] for part in parts])

    def gather(self, own: Tensor) -> Tensor:
        """All tokens of this rank's share, [whole, columns / ranks], of `own` [tokens, columns]."""
        parts = own.unflatten(1, (self.group.size(), -1)).transpose(0, 1)
        of_ranks: Tensor = all_to_all(self.group, parts.contiguous())
        return of_ranks.flatten(0, 1).index_select(0, self.places)

    def give_back(self, whole: Tensor, tokens: int) -> Tensor:
        """This rank's tokens of all shares, [tokens, columns * ranks], 0 for padding."""
        laid = whole.new_zeros((self.group.size() * tokens, whole.shape[1]))
        laid = laid.index_copy(0, self.places, whole).unflatten(0, (-1, tokens))
        parts: Tensor = all_to_all(self.group, laid)
        return parts.transpose(0, 1).flatten(1)
