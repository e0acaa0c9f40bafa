"""Causal attention through torch's scaled_dot_product_attention, as the core of megatron-core's
SelfAttention.

Plain batches and packed sequences, grouped queries, sliding windows; any device. It sees only this
rank's heads, after rotation, and knows nothing of tensor parallelism.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class CoreAttention(torch.nn.Module):
    """Causal attention without dropout and without a dense mask from the caller."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        assert config.attention_dropout == 0.0 and config.context_parallel_size == 1
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        # megatron-core counts the tokens before the current one, spec.sliding_window includes it.
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [seq_len, micro_batch, heads, head_dim], or [tokens, heads, head_dim] where
                sequences are packed.
            key: the same with KV heads; so is `value`.
            attention_mask: None; the mask is causal.
            packed_seq_params: boundaries of packed sequences, which cover all tokens.

        Returns:
            [seq_len, micro_batch, heads * head_dim], or [tokens, heads * head_dim] where packed.
        """
        assert attention_mask is None and attention_bias is None
        if packed_seq_params is None:
            mixed = self._attend(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
            return mixed.permute(2, 0, 1, 3).flatten(2)
        return self._packed(query, key, value, packed_seq_params).flatten(1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        """One call for all sequences of similar length, padded to the longest of them.

        What stands in the padding does not matter: under a causal mask only later padding sees it.
        """
        padded = packed.cu_seqlens_q_padded
        bounds = (packed.cu_seqlens_q if padded is None else padded).tolist()
        mixed, order = [], []
        for starts, lengths in _similar(bounds):
            offsets = torch.arange(max(lengths))
            places = torch.tensor(starts)[:, None] + offsets
            valid = offsets < torch.tensor(lengths)[:, None]
            index = places.clamp(max=bounds[-1] - 1).to(query.device)
            batch = (tensor[index].transpose(1, 2) for tensor in (query, key, value))
            mixed.append(self._attend(*batch).transpose(1, 2)[valid.to(query.device)])
            order.append(places[valid])
        return torch.cat(mixed)[torch.cat(order).argsort().to(query.device)]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[micro_batch, heads, seq_len, head_dim] each."""
        length = query.shape[2]
        mask = None
        if self.window is not None and length > self.window:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < self.window)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _similar(bounds: list[int]) -> list[tuple[list[int], list[int]]]:
    """Starts and lengths of the sequences between `bounds`, those whose lengths have the same power
    of two above.
    """
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for start, stop in pairwise(bounds):
        starts, lengths = groups.setdefault((stop - start - 1).bit_length(), ([], []))
        starts.append(start)
        lengths.append(stop - start)
    return list(groups.values())
