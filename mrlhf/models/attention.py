"""Causal attention within packed sequences, with rotation, on any device.

It takes several query heads for each KV head, sliding windows, and sequences whose keys lie on
several ranks. It sees only this rank's heads and knows nothing of tensor parallelism.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mrlhf.models import compiled_attention
from mrlhf.models.ops import rotate
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

    It is one compiled function on a host, and torch's attention of sequences of any lengths on a
    GPU in bfloat16. If neither is available, sequences are computed one by one.

    With context parallelism the keys and values of whole sequences are gathered for this layer
    alone. What is kept for the backward pass is this rank's share; they are gathered again there.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        """Take the scale and the layer's window from megatron-core's configuration.

        `layer_number` counts from 1 in the whole model. A `softmax_scale` of None is 1 /
        sqrt(head_dim).
        """
        super().__init__()
        assert config.attention_dropout == 0.0
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window = None
        if config.window_size is not None and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            # megatron-core counts only the tokens before the current one.
            self.window = config.window_size[0] + 1
        # Whether what this layer gathers is dropped anyhow, and computed again.
        self._is_recomputed = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self, projections: Projections, rotation: Rotation | None, packed: PackedSequences
    ) -> Tensor:
        """Rotate q and k of the projections, unless `rotation` is None, and attend.

        The sequences of `packed` cover all tokens.

        Returns:
            [tokens, heads * head_dim].
        """
        first = projections[0]
        if first.device.type == "cpu" and compiled_attention.is_available(first.dtype):
            tables = None if rotation is None else (rotation.cosines, rotation.sines)
            settings = compiled_attention.Settings(
                packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.keys, self.scale, self.window
            )
            return compiled_attention.attend(projections, tables, settings)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend_rotated(query, key, value, packed)

        rotated = rotated_heads(projections, rotation)
        if packed.keys is None or self._is_recomputed or not torch.is_grad_enabled():
            return attend(*rotated)
        output: Tensor = checkpoint(attend, False, *rotated)
        return output

    def _attend_rotated(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> Tensor:
        """Attend to the keys of all ranks, on torch's operators, to [tokens, heads * head_dim]."""
        if packed.keys is not None:
            key, value = packed.keys.gather(torch.stack([key, value], dim=1)).unbind(1)
        if _has_varlen(query.device, query.dtype, query.shape[-1]):
            return self._attend_varlen(query, key, value, packed).flatten(1)
        lengths = (packed.query_lengths, packed.key_lengths)
        return self.attend_one_by_one(query, key, value, *lengths).flatten(1)

    def _attend_varlen(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> Tensor:
        # The window ends at the query, and the last query stands beside the last key.
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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_lengths: list[int],
        key_lengths: list[int],
    ) -> Tensor:
        """Attend by torch's scaled_dot_product_attention, sequence by sequence.

        Args:
            query: rotated, [tokens, heads, head_dim].
            key: rotated, [seen, kv_heads, head_dim].
            value: [seen, kv_heads, head_dim].
            query_lengths: tokens of each sequence, or of the part of it that is here.
            key_lengths: tokens of each up to the end of that part.

        Returns:
            [tokens, heads, head_dim].
        """
        outputs = []
        queries = query.transpose(0, 1).split(query_lengths, dim=1)
        keys = key.transpose(0, 1).split(key_lengths, dim=1)
        values = value.transpose(0, 1).split(key_lengths, dim=1)

        for q, k, v in zip(queries, keys, values, strict=True):
            mask = self._mask(q.shape[1], k.shape[1], q.device)
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

    def _mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return which keys the last tokens see, [queries, keys]; None for causality alone."""
        if queries == keys and (self.window is None or keys <= self.window):
            return None
        key = torch.arange(keys, device=device)
        distance = key[keys - queries :, None] - key[None, :]
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)


def rotated_heads(
    projections: Projections, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate to q [tokens, heads, head_dim], and k and v [tokens, kv_heads, head_dim]."""
    if len(projections) == 3:
        query, key, value = projections
        if rotation is not None:
            tables = _tables(rotation)
            query = rotate(query, *tables)
            key = rotate(key, *tables)
        return query, key, value

    mixed = projections[0]
    turned = mixed[:, :, :-1]
    if rotation is not None:
        shape = turned.shape
        turned = rotate(turned.flatten(1, 2), *_tables(rotation)).view(shape)
    return turned[:, :, :-1].flatten(1, 2), turned[:, :, -1], mixed[:, :, -1]


def _tables(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each token, for all heads."""
    cosines, sines = rotation.by_token
    return cosines.unsqueeze(1), sines.unsqueeze(1)


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
