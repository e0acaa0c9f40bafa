"""Brings the keys and values of whole sequences to every context-parallel rank, layer by layer.

A rank has the keys of its own segments. In the forward pass it gathers those of all ranks, and lays
out for each of its segments the tokens that the segment may see: all up to its own end. In the
backward pass each rank gets back the sum of the gradients of its own keys. This file knows no
attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.segments import Segments


@dataclass(frozen=True)
class KeyExchange:
    """The exchange of one pack, the same for all layers."""

    group: dist.ProcessGroup  # the ranks that share the sequences
    # int64 [seen], the tokens that each held segment may see, in order, as their places among the
    # tokens of all ranks, one rank after the other.
    places: Tensor
    tokens: int  # the number of tokens of a rank

    def gather(self, own: Tensor) -> Tensor:
        """The keys that each held segment may see, [seen, ...], from this rank's `own` [tokens,
        ...].

        They have gradients.
        """
        gathered: Tensor = _Gather.apply(self, own)
        return gathered

    def lay_out(self, own: Tensor) -> Tensor:
        """The same as `gather` without gradients."""
        whole = own.new_empty((self.group.size() * self.tokens, *own.shape[1:]))
        dist.all_gather_into_tensor(whole, own.contiguous(), group=self.group)
        return whole.index_select(0, self.places)

    def give_back(self, gradients: Tensor) -> Tensor:
        """The gradients of this rank's tokens, summed over all ranks that saw them, [tokens, ...].

        `gradients` [seen, ...] are those of the result of `lay_out`.
        """
        shape = gradients.shape[1:]
        whole = gradients.new_zeros((self.group.size() * self.tokens, *shape))
        # A token stands in it twice if both segments of this rank see it.
        whole.index_add_(0, self.places, gradients)
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


def seen_places(boundaries: Tensor, tokens: int, segments: Segments) -> Tensor:
    """The places of `KeyExchange`.

    `boundaries` is int32 [sequences + 1]: the beginning of each padded sequence, and the end. A
    rank has `tokens` tokens.
    """
    device = boundaries.device
    begins = boundaries[:-1].long()
    lengths = boundaries.diff().long() // segments.count
    held = torch.tensor(segments.held, dtype=torch.int64, device=device)
    seen = (lengths[:, None] * (held + 1)).flatten()

    # For each token that is seen: the segment length and the beginning of its sequence, and its
    # position in that. The number of these tokens is known without waiting for the device.
    total = tokens * segments.size // segments.count * (sum(segments.held) + len(segments.held))
    number = torch.arange(len(seen), device=device).repeat_interleave(seen, output_size=total)
    position = torch.arange(total, device=device) - (seen.cumsum(0) - seen)[number]
    sequence = number // len(segments.held)
    length = lengths[sequence]

    segment = position // length
    owner = torch.minimum(segment, segments.count - 1 - segment)
    is_second = (segment >= segments.size).long()
    among_own = begins[sequence] // segments.size + is_second * length + position % length
    return owner * tokens + among_own
