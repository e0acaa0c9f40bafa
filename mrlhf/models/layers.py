"""megatron-core's layer specs for a decoder of attention and a gated MLP, and RMSNorm everywhere.

There are two builds: megatron-core's own layers with our attention and norm, which need torch
alone, and TransformerEngine's layers, for models that need nothing beyond them. This file knows no
family and no layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from mrlhf.models.attention import CoreAttention
from mrlhf.models.norm import RMSNorm
from mrlhf.models.spec import ModelSpec


class BiasedColumnLinear(ColumnParallelLinear):
    """A linear layer whose rows are split over ranks, with a bias whatever the model has else."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "bias": True})


class BiasedRowLinear(RowParallelLinear):
    """A linear layer whose columns are split over ranks, with a bias that every rank has whole."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "bias": True})


def dense_decoder(
    spec: ModelSpec, num_layers: int, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """The decoder of a chunk.

    Args:
        spec: the model.
        num_layers: layers of this chunk.
        transformer_engine: build the layers of TransformerEngine's modules, if these have all that
            the model needs.
    """
    needs_ours = spec.o_bias or spec.mlp_bias or spec.residual_multiplier != 1.0
    if transformer_engine and not needs_ours:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm == "head")
    else:
        layer = plain_layer(spec)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def plain_layer(spec: ModelSpec) -> ModuleSpec:
    """A layer of megatron-core's linear layers with our attention and norm."""
    head_norm = RMSNorm if spec.qk_norm == "head" else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=BiasedRowLinear if spec.o_bias else RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=BiasedColumnLinear if spec.mlp_bias else ColumnParallelLinear,
        linear_fc2=BiasedRowLinear if spec.mlp_bias else RowParallelLinear,
    )
    add = get_bias_dropout_add
    if spec.residual_multiplier != 1.0:
        add = scaled_add(spec.residual_multiplier)

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=add,
            # Checkpoints carry TransformerEngine's names, so that either build reads the other's.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def scaled_add(multiplier: float) -> Callable[..., Any]:
    """As megatron-core's `get_bias_dropout_add`, without dropout; the addend is multiplied."""

    def get_add(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(
            output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            assert probability == 0.0
            output, bias = output_and_bias
            if bias is not None:
                output = output + bias
            return residual + output * multiplier

        return add

    return get_add
