"""megatron-core's layer specs for a decoder of attention and a gated MLP, and RMSNorm everywhere.

There are two builds: megatron-core's own layers with our attention and norm, which need torch
alone, and TransformerEngine's layers. This file knows no family and no layout.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mrlhf.models.attention import CoreAttention
from mrlhf.models.norm import RMSNorm
from mrlhf.models.self_attention import TensorParallelSelfAttention


def uniform_decoder(
    num_layers: int, *, qk_norm: bool, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """A decoder of equal layers.

    Args:
        num_layers: layers of this chunk.
        qk_norm: RMSNorm on each head of q and k.
        transformer_engine: build the layers of TransformerEngine's modules.
    """
    if transformer_engine:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
        layer.submodules.self_attention.module = TensorParallelSelfAttention
    else:
        layer = plain_layer(qk_norm)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def plain_layer(qk_norm: bool) -> ModuleSpec:
    """A layer of megatron-core's linear layers with our attention and norm."""
    head_norm = RMSNorm if qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=TensorParallelSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
            # Checkpoints carry TransformerEngine's names, so that either build reads the other's.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
