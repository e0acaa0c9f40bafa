"""Causal attention for megatron-core's SelfAttention, by torch's scaled_dot_product_attention.

It takes plain batches and packed sequences, several query heads for each KV head, and sliding
windows, on any device. It sees only this rank's heads, after rotation, and knows nothing of tensor
parallelism.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor


class CoreAttention(torch.nn.Module):
    """Causal attention without dropout and without a dense mask from the caller."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        """Take the scale and the layer's window from megatron-core's configuration.

        Args:
            config: of the model.
            layer_number: the layer's number in the whole model, counted from 1.
            softmax_scale: products are multiplied by it; None for 1 / sqrt(head_dim).
        """
        super().__init__()
        assert config.attention_dropout == 0.0 and config.context_parallel_size == 1
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window = None
        if config.window_size is not None and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            # megatron-core counts only the tokens before the current one.
            self.window = config.window_size[0] + 1

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
            query: [seq_len, micro_batch, heads, head_dim], or [tokens, heads, head_dim] if
                sequences are packed.
            key: the same shape, with KV heads.
            value: the same shape as `key`.
            attention_mask: None; the mask is causal.
            attn_mask_type: not read; megatron-core passes it.
            attention_bias: None.
            packed_seq_params: boundaries of packed sequences, which cover all tokens.

        Returns:
            [seq_len, micro_batch, heads * head_dim], or [tokens, heads * head_dim] if packed.
        """
        assert attention_mask is None and attention_bias is None
        if packed_seq_params is not None:
            return self._attend_packed(query, key, value, packed_seq_params).flatten(1)
        batch = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return self._attend(*batch).permute(2, 0, 1, 3).flatten(2)

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """One call for all sequences of similar length, padded to the longest of them.

        The numbers in the padding do not matter: under a causal mask only later padding sees them.
        """
        bounds = packed.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed.cu_seqlens_q
        edges = bounds.tolist()

        outputs = []
        positions = []
        for starts, lengths in _by_similar_length(edges):
            offsets = torch.arange(max(lengths))
            places = torch.tensor(starts)[:, None] + offsets
            valid = offsets < torch.tensor(lengths)[:, None]

            index = places.clamp(max=edges[-1] - 1).to(query.device)
            batch = (tensor[index].transpose(1, 2) for tensor in (query, key, value))
            outputs.append(self._attend(*batch).transpose(1, 2)[valid.to(query.device)])
            positions.append(places[valid])
        return torch.cat(outputs)[torch.cat(positions).argsort().to(query.device)]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within plain sequences; all are [micro_batch, heads, seq_len, head_dim]."""
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


def _by_similar_length(edges: list[int]) -> list[tuple[list[int], list[int]]]:
    """Starts and lengths of the sequences between `edges`, in lists of similar length.

    Two lengths are similar if the same power of two is the smallest that is not below them.
    """
    similar: dict[int, tuple[list[int], list[int]]] = {}
    for start, stop in pairwise(edges):
        length = stop - start
        starts, lengths = similar.setdefault((length - 1).bit_length(), ([], []))
        starts.append(start)
        lengths.append(length)
    return list(similar.values())
