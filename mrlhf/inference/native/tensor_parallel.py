"""What the ranks of one replica tell each other: partial sums, shards of the logits, and the tokens that were drawn.

It is the only file of the engine that communicates. It knows no model; with one rank every call returns its argument.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallel:
    """The tensor-parallel group of a replica, or None where one rank is the whole replica."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of `partial` over the ranks; `partial` is overwritten."""
        if self.size > 1:
            dist.all_reduce(partial, group=self._group)
        return partial

    def gather_columns(self, shard: Tensor) -> Tensor | None:
        """The shards [batch, vocab_shard] of all ranks side by side, on the first rank; None on the others."""
        if self.size == 1:
            return shard
        shards = [torch.empty_like(shard) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(shard.contiguous(), shards, group=self._group, group_dst=0)
        return None if shards is None else torch.cat(shards, dim=-1)

    def from_first(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The int64 `tokens` and float32 `logprobs` [batch] of the first rank; those of others are not looked at."""
        if self.size == 1:
            return tokens, logprobs
        both = torch.stack([tokens.to(torch.float64), logprobs.to(torch.float64)])
        dist.broadcast(both, group=self._group, group_src=0)
        return both[0].to(torch.int64), both[1].to(torch.float32)
