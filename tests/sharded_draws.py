"""Draws from logits whose columns are spread over several ranks, all in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Tokens = tuple[Tensor, Tensor]
"""Tokens, int64 [batch], and their log-probabilities [batch]."""


def draw(
    kernels: Any, logits: Tensor, scale: float, uniform: Tensor, widths: Sequence[int], each: int
) -> Tokens:
    """By `logit_blocks` and `draw` of `kernels`, on shards of these `widths`."""
    shards = logits.split(list(widths), dim=1)
    blocks = -(-max(widths) // each)
    shards = [shard.contiguous() for shard in shards]
    parts = [kernels.logit_blocks(shard, scale, blocks, each) for shard in shards]
    first = 0
    tokens = torch.zeros(len(logits), dtype=torch.int64)
    logprobs = torch.zeros(len(logits))
    for rank, shard in enumerate(shards):
        own = torch.full_like(tokens, -7), torch.full_like(logprobs, -7.0)
        kernels.draw(shard, scale, torch.stack(parts), uniform, rank, first, each, *own)
        tokens += own[0]
        logprobs += own[1]
        first += shard.shape[1]
    return tokens, logprobs


def plain(logits: Tensor, scale: float, uniform: Tensor) -> Tokens:
    """The same in float64 and over the whole vocabulary."""
    exact = torch.log_softmax(logits.double() * scale, dim=-1)
    ends = exact.exp().cumsum(dim=-1)
    drawn = torch.searchsorted(ends, uniform.clamp_min(0)[:, None], right=True)[:, 0]
    last = logits.shape[1] - 1
    tokens = torch.where(uniform < 0, logits.float().argmax(dim=-1), drawn.clamp_max(last))
    return tokens, exact.gather(-1, tokens[:, None])[:, 0]
