"""The exchanges of the ranks of one replica: partial sums, and a few numbers about their logits.

This is the only file of the engine that communicates. It knows no model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallel:
    """The tensor-parallel group of a replica; None if one rank is the whole replica."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._widths: list[int] = []  # of the ranks' logits, once they are known

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial` over the ranks; `partial` is overwritten."""
        if self.size > 1:
            dist.all_reduce(partial, group=self._group)
        return partial

    def gather(self, mine: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape, stacked: [ranks, ...]."""
        if self.size == 1:
            return mine[None]
        parts = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(parts, mine.contiguous(), group=self._group)
        return parts.view(self.size, *mine.shape)

    def widths(self, shard: Tensor) -> list[int]:
        """Columns of each rank's shard, [batch, vocab_shard]; they are the same in each call."""
        if self.size == 1:
            return [shard.shape[1]]
        if not self._widths:
            self._widths = self.gather(torch.tensor([shard.shape[1]]))[:, 0].tolist()
        return self._widths

    def all_columns(self, shard: Tensor) -> Tensor:
        """Return the shards [batch, vocab_shard] of all ranks side by side."""
        if self.size == 1:
            return shard
        widths = self.widths(shard)
        padded = shard.new_zeros(len(shard), max(widths))
        padded[:, : shard.shape[1]] = shard
        parts = zip(self.gather(padded), widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], dim=-1)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        if self.size == 1:
            return number
        return int(self.gather(torch.tensor([number], dtype=torch.int64)).min())
