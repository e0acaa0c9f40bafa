"""Modules that stand in for TransformerEngine's, of torch alone: its names and its signatures.

`BREAK` names a fault of them; a test sets it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrlhf.models.layers import plain_layer
from mrlhf.models.linear import ColumnLinear, RowLinear
from mrlhf.models.megatron_versions import submodules_of
from mrlhf.models.ops import rms_norm
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.packed_sequences import PackedSequences

# isort: split
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

BREAKS = ("sequences see each other", "no norm", "gate and up change places", "an error")
BREAK = ""


class _Fused:
    """A linear layer that adds the gradient of its weight to the sum if it is told to."""

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """TransformerEngine's name of megatron-core's switch."""
        return self.gradient_accumulation_fusion

    @fuse_wgrad_accumulation.setter
    def fuse_wgrad_accumulation(self, value: bool) -> None:
        self.gradient_accumulation_fusion = value


class Row(_Fused, RowLinear):
    """A linear layer whose columns are split."""


class NormedColumn(_Fused, ColumnLinear):
    """RMSNorm, and a linear layer whose rows are split."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.config
        ones = torch.ones(config.hidden_size, dtype=config.params_dtype)
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Normalise, and multiply."""
        if BREAK == "no norm":
            x = x * self.layer_norm_weight
        else:
            x = rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        output, bias = super().forward(x, **options)
        is_mlp = self.output_size == 2 * self.config.ffn_hidden_size
        if BREAK == "gate and up change places" and is_mlp:
            output = output.roll(output.shape[-1] // 2, dims=-1)
        return output, bias


class Attention(torch.nn.Module):
    """Causal attention within the sequences of a pack."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any,
        packed_seq_params: PackedSequences,
    ) -> Tensor:
        """Map query [tokens, heads, head_dim] and one for each KV head to [tokens, hidden]."""
        if BREAK == "an error":
            raise RuntimeError("no attention backend")
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        if BREAK == "sequences see each other":
            lengths = [sum(lengths)]
        outputs = []
        for q, k, v in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
            attended = torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(0, 1)[None] for part in (q, k, v)),
                is_causal=True,
                scale=self._scale,
                enable_gqa=True,
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def layer(spec: ModelSpec, rope: str | None) -> ModuleSpec:
    """What stands in for `transformer_engine_layer`."""
    made = plain_layer(spec, rope)
    parts = made.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.sharded_state_dict_keys_map = {}
    attention = parts.self_attention.submodules
    attention.linear_qkv = NormedColumn
    attention.core_attention = Attention
    attention.linear_proj = Row
    mlp = submodules_of(parts.mlp)
    mlp.linear_fc1 = NormedColumn
    mlp.linear_fc2 = Row
    return made
