"""Lays out the keys and values that each segment of a pack may see, layer by layer.

A rank has the keys of its own segments. In the forward pass it gathers those of the other
context-parallel ranks, if there are any, and lays out for each of its segments the tokens that the
segment may see: a shared prompt before it, and all of its part up to its own end. In the backward
pass each rank gets back the sum of the gradients of its own keys. This file knows no attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.packs import Trees
from mrlhf.parallel.segments import Segments


@dataclass(frozen=True)
class KeyExchange:
    """The exchange of one pack, the same for all layers."""

    group: dist.ProcessGroup | None  # the ranks that share the sequences; None: this one alone
    # int64 [seen], the tokens that each held segment may see, in order, as their places among the
    # tokens of all ranks, one rank after the other.
    places: Tensor
    tokens: int  # the number of tokens of a rank

    def gather(self, own: Tensor) -> Tensor:
        """The keys that each held segment may see, [seen, ...], with gradients to `own`."""
        return _Gather.apply(self, own)

    def lay_out(self, own: Tensor) -> Tensor:
        """The same as `gather` without gradients."""
        if self.group is None:
            return own.index_select(0, self.places)
        whole = own.new_empty((self.group.size() * self.tokens, *own.shape[1:]))
        dist.all_gather_into_tensor(whole, own.contiguous(), group=self.group)
        return whole.index_select(0, self.places)

    def give_back(self, gradients: Tensor) -> Tensor:
        """The gradients of this rank's tokens, over all ranks that saw them, [tokens, ...]."""
        shape = gradients.shape[1:]
        ranks = 1 if self.group is None else self.group.size()
        whole = gradients.new_zeros((ranks * self.tokens, *shape))
        # A token stands in it as often as segments of this rank see it.
        whole.index_add_(0, self.places, gradients)
        if self.group is None:
            return whole
        own = gradients.new_empty((self.tokens, *shape))
        dist.reduce_scatter_tensor(own, whole, group=self.group)
        return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: KeyExchange, own: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.lay_out(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.give_back(gradients[0])


def seen_places(
    boundaries: Tensor, tokens: int, segments: Segments, trees: Trees | None = None
) -> Tensor:
    """The places of `KeyExchange`.

    `boundaries` is int32 [parts + 1]: the beginning of each padded part, and the end; without
    `trees` a part is a sequence. A rank has `tokens` tokens.
    """
    device = boundaries.device
    begins = boundaries[:-1].long()
    lengths = boundaries.diff().long() // segments.count
    held = torch.tensor(segments.held, dtype=torch.int64, device=device)
    seen = lengths[:, None] * (held + 1)
    # The number of tokens that are seen is known without waiting for the device.
    total = tokens * segments.size // segments.count * (sum(segments.held) + len(segments.held))
    if trees is not None:
        seen = seen + trees.firsts.long()[:, None]
        total += trees.before * len(segments.held)
    seen = seen.flatten()

    # For each token that is seen: its part, and its position in that.
    number = torch.arange(len(seen), device=device).repeat_interleave(seen, output_size=total)
    position = torch.arange(total, device=device) - (seen.cumsum(0) - seen)[number]
    part = number // len(segments.held)
    if trees is not None:
        firsts = trees.firsts.long()
        prompts = torch.arange(len(firsts), device=device)
        prompts[trees.ends.long()] = trees.prompts.long().clamp(max=len(firsts) - 1)
        before = firsts[part]
        part = torch.where(position < before, prompts[part], part)
        position = torch.where(position < before, position, position - before)

    return places_of(position, begins[part], lengths[part], tokens, segments)


def places_of(
    position: Tensor, begins: Tensor, lengths: Tensor, tokens: int, segments: Segments
) -> Tensor:
    """The places of positions of parts among the tokens of all ranks, one rank after the other.

    Of the part of each are given where it begins, over all ranks, and the length of its segments.
    """
    segment = position // lengths
    owner = torch.minimum(segment, segments.count - 1 - segment)
    is_second = (segment >= segments.size).long()
    among_own = begins // segments.size + is_second * lengths + position % lengths
    return owner * tokens + among_own
