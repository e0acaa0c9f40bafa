"""RMSNorm as a module, after a linear layer, and over all heads of q and of k.

They fit into megatron-core's layers without TransformerEngine. This file knows no family.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.models.linear import RowLinear, split_parameter, whole_parameter
from mrlhf.models.ops import rms_norm, wide_rms_norm
from mrlhf.models.self_attention import TensorParallelSelfAttention


class RMSNorm(torch.nn.Module):
    """Root-mean-square normalisation over the last dimension, as in Hugging Face's Llama."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = whole_parameter(config, hidden_size, value=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., hidden] normalised, in its dtype."""
        return rms_norm(x, self.weight, self.eps)


class WideRMSNorm(RMSNorm):
    """RMSNorm that multiplies by its weight in float32, as in Hugging Face's Gemma 4."""

    offset = 0.0  # added to the weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., hidden] normalised, in its dtype."""
        return wide_rms_norm(x, self.offset + self.weight.float(), self.eps)


class RMSNormPlusOne(WideRMSNorm):
    """RMSNorm that multiplies by 1 + its weight, as in Hugging Face's Gemma 2 and 3."""

    offset = 1.0


class NormedRowLinear(RowLinear):
    """A linear layer whose columns are split over ranks, and RMSNorm of the ranks' sum."""

    norm: type[RMSNorm] = RMSNorm

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.output_norm = self.norm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map x [..., input_size of the rank] to [..., output_size], and no bias."""
        output, bias = super().forward(x)
        assert bias is None
        return self.output_norm(output), None


class NormedWideRowLinear(NormedRowLinear):
    """A linear layer as `NormedRowLinear`, whose norm multiplies in float32."""

    norm = WideRMSNorm


class NormedPlusOneRowLinear(NormedRowLinear):
    """A linear layer as `NormedRowLinear`, whose norm multiplies by 1 + its weight."""

    norm = RMSNormPlusOne


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over all heads of all ranks together; a rank has the weights of its own heads."""

    def __init__(
        self,
        config: TransformerConfig,
        heads: int,
        all_heads: int,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        """Make the weights of `heads` of the model's `all_heads` heads."""
        super().__init__()
        size = config.kv_channels
        self.weight = split_parameter(config, heads * size, value=1.0)
        self._numbers = all_heads * size
        self._eps = config.layernorm_epsilon
        self._tp_group = tp_group

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., heads, head_dim] normalised, in its dtype."""
        wide = x.float()
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        if self._tp_group.size() > 1:
            # The sum depends on every rank's numbers, and every rank's output on the sum.
            squares = reduce_from_tensor_model_parallel_region(squares, self._tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, self._tp_group)
        wide = wide * torch.rsqrt(squares / self._numbers + self._eps)
        return self.weight.view(x.shape[-2:]) * wide.to(x.dtype)


class ProjectionNormAttention(TensorParallelSelfAttention):
    """Self-attention with RMSNorm over all heads of q and of k."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        tp_group = self.pg_collection.tp
        heads = self.num_attention_heads_per_partition
        kv_heads = self.num_query_groups_per_partition
        self.q_layernorm = ProjectionNorm(config, heads, config.num_attention_heads, tp_group)
        self.k_layernorm = ProjectionNorm(config, kv_heads, config.num_query_groups, tp_group)
