"""Causal attention within packed sequences, with rotation, on any device; nothing is padded.

It takes several query heads for each KV head, and sliding windows. It sees only this rank's heads
and knows nothing of tensor parallelism.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mrlhf.models import compiled_attention
from mrlhf.parallel.packed_sequences import PackedSequences, Rotation

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None  # type: ignore[assignment]

Projections = tuple[Tensor, ...]
"""For each KV head its q heads, its k and its v in one tensor, [tokens, kv_heads, heads per KV head
+ 2, head_dim]; or q [tokens, heads, head_dim], and k and v [tokens, kv_heads, head_dim]."""


class CoreAttention(torch.nn.Module):
    """Causal attention without dropout and without a mask from the caller.

    On a host it is one compiled function, on a GPU in bfloat16 torch's attention of sequences of
    any lengths. Where there is neither, sequences are computed one by one.
    """

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
        self, projections: Projections, rotation: Rotation | None, packed: PackedSequences
    ) -> Tensor:
        """Rotate, and attend.

        Args:
            projections: q, k and v before rotation.
            rotation: cosines and sines of each token; None to rotate nothing.
            packed: the sequences, which cover all tokens.

        Returns:
            [tokens, heads * head_dim].
        """
        first = projections[0]
        if first.device.type == "cpu" and compiled_attention.is_available(first.dtype):
            settings = compiled_attention.Settings(packed.cu_seqlens_q, self.scale, self.window)
            return compiled_attention.attend(projections, rotation, settings)

        query, key, value = rotated_heads(projections, rotation)
        if _has_varlen(query.device, query.dtype, query.shape[-1]):
            return self._attend_varlen(query, key, value, packed).flatten(1)
        return self.attend_one_by_one(query, key, value, packed.lengths).flatten(1)

    def _attend_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> Tensor:
        output = varlen.varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1 if self.window is None else self.window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(output, Tensor)
        return output

    def attend_one_by_one(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]
    ) -> Tensor:
        """Attend by torch's scaled_dot_product_attention, sequence by sequence.

        Args:
            query: rotated, [tokens, heads, head_dim].
            key: rotated, [tokens, kv_heads, head_dim].
            value: [tokens, kv_heads, head_dim].
            lengths: tokens of each sequence.

        Returns:
            [tokens, heads, head_dim].
        """
        outputs = []
        parts = (tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value))
        for q, k, v in zip(*parts, strict=True):
            mask = self._window_mask(q.shape[1], q.device)
            output = F.scaled_dot_product_attention(
                q[None],
                k[None],
                v[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=q.shape[0] != k.shape[0],
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)

    def _window_mask(self, length: int, device: torch.device) -> Tensor | None:
        """Which tokens each token sees, [length, length]; None where the window hides nothing."""
        if self.window is None or length <= self.window:
            return None
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < self.window)


def rotated_heads(
    projections: Projections, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads, head_dim], and k and v [tokens, kv_heads, head_dim], after rotation."""
    if len(projections) == 3:
        query, key, value = projections
        if rotation is not None:
            query = _rotated(query, rotation)
            key = _rotated(key, rotation)
        return query, key, value

    mixed = projections[0]
    turned = mixed[:, :, :-1]
    if rotation is not None:
        shape = turned.shape
        turned = _rotated(turned.flatten(1, 2), rotation).view(shape)
    return turned[:, :, :-1].flatten(1, 2), turned[:, :, -1], mixed[:, :, -1]


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """x [tokens, heads, head_dim], of which the first dimensions are rotated, in its dtype."""
    cosines, sines = (table.unsqueeze(1) for table in rotation)
    half = cosines.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    # The tables are float32, and so are the products.
    turned_first = first * cosines - second * sines
    turned_second = second * cosines + first * sines
    return torch.cat([turned_first.to(x.dtype), turned_second.to(x.dtype), rest], dim=-1)


@cache
def _has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch attends to sequences of any lengths here, with windows and shared KV heads."""
    if device.type != "cuda" or varlen is None:
        return False
    parameters = inspect.signature(varlen.varlen_attn).parameters
    return (
        {"scale", "window_size", "enable_gqa"} <= set(parameters)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
