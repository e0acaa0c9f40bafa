"""megatron-core's layer specs for a decoder of attention and gated MLPs, and RMSNorm everywhere.

There are two builds: megatron-core's own layers with our attention and norm, which need torch
alone, and TransformerEngine's layers, for models that need nothing beyond them. This file knows no
family and no layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from mrlhf.models.delta_net import GatedDeltaNet
from mrlhf.models.latent_attention import LatentSelfAttention
from mrlhf.models.linear import (
    BiasedColumnLinear,
    BiasedRowLinear,
    ColumnLinear,
    KeysAsValuesLinear,
    QueriesLinear,
    RowLinear,
    whole_parameter,
)
from mrlhf.models.linked_layers import LinkedLayer
from mrlhf.models.megatron_versions import dense_mlp, submodules_of
from mrlhf.models.mixture import MixtureLayer
from mrlhf.models.norms import (
    NormedPlusOneRowLinear,
    NormedRowLinear,
    NormedWideRowLinear,
    ProjectionNormAttention,
    RMSNorm,
    RMSNormPlusOne,
    WideRMSNorm,
)
from mrlhf.models.ops import gated
from mrlhf.models.rope import Rope, rope_of
from mrlhf.models.self_attention import CoreAttention, TensorParallelSelfAttention
from mrlhf.models.spec import ModelSpec


class GatedActivation(torch.nn.Module):
    """silu(gate) * up, of the concatenation of the two."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.use_te_activation_func, "megatron-core must not activate by itself"

    def forward(self, gate_up: Tensor) -> Tensor:
        """Map gate_up [tokens, 1, 2 * ffn] to [tokens, 1, ffn]."""
        return gated(gate_up)


class GeluGatedActivation(GatedActivation):
    """gelu(gate) * up, by the approximation of GELU with tanh."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """Map gate_up [tokens, 1, 2 * ffn] to [tokens, 1, ffn]."""
        return gated(gate_up, "gelu_tanh")


class ScaledLayer(TransformerLayer):
    """megatron-core's layer, whose output is multiplied by a number that is not trained."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.layer_scalar = whole_parameter(config, 1, value=1.0).requires_grad_(False)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the layer, as TransformerLayer does."""
        hidden_states, context = super().forward(*arguments, **options)
        return hidden_states * self.layer_scalar, context


class ScaledMixtureLayer(ScaledLayer, MixtureLayer):
    """A layer with experts, whose output is multiplied by a number that is not trained."""


def decoder(spec: ModelSpec, layers: range, transformer_engine: bool) -> TransformerBlockSubmodules:
    """Return the decoder of a chunk with these `layers`, numbered in the whole model."""
    make = transformer_engine_layer if transformer_engine else plain_layer
    # Layers that rotate alike have the same heads.
    by_rope = {rope: make(spec.of_layer(spec.ropes.index(rope)), rope) for rope in set(spec.ropes)}
    layer_specs = []
    for layer in layers:
        dense = by_rope[spec.ropes[layer]]
        if spec.has_delta(layer):
            dense = delta_layer(spec, dense)
        if spec.links_layers:
            dense = linked_layer(spec, layer, dense)
        layer_specs.append(mixture_layer(spec, dense) if spec.has_experts(layer) else dense)
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=_norm(spec))


def delta_layer(spec: ModelSpec, dense: ModuleSpec) -> ModuleSpec:
    """Return the layer with a gated delta net in place of a dense layer's attention."""
    attention = ModuleSpec(module=GatedDeltaNet, params={"net": spec.delta})
    return replace(dense, submodules=replace(dense.submodules, self_attention=attention))


def linked_layer(spec: ModelSpec, layer: int, dense: ModuleSpec) -> ModuleSpec:
    """Return the dense layer that takes, or lends, more than hidden states."""
    assert spec.scales_layers, "the layers that are linked are scaled, too"
    own = spec.of_layer(layer)
    attention = dense.submodules.self_attention
    if not own.has_keys:
        queries = replace(attention.submodules, linear_qkv=QueriesLinear, k_layernorm=IdentityOp)
        params = attention.params | {"spec": own}
        attention = replace(attention, params=params, submodules=queries)
    submodules = replace(dense.submodules, self_attention=attention)
    return ModuleSpec(LinkedLayer, {"spec": spec, "number": layer}, submodules)


def mixture_layer(spec: ModelSpec, dense: ModuleSpec) -> ModuleSpec:
    """Return the layer with a dense layer's attention, and a mixture of experts as its MLP."""
    # TransformerEngine fuses the norm into the linear layer that follows it.
    submodules = replace(
        dense.submodules,
        pre_mlp_layernorm=_norm(spec),
        mlp=IdentityOp,
        sharded_state_dict_keys_map={},
    )
    params = {"experts": spec.experts, "shared": _mlp(spec, bias=False), "norm": _norm(spec)}
    return ModuleSpec(
        module=ScaledMixtureLayer if spec.scales_layers else MixtureLayer,
        params=params,
        submodules=submodules,
    )


def transformer_engine_layer(spec: ModelSpec, rope: str | None) -> ModuleSpec:
    """Return a layer of TransformerEngine's modules; `rope` as for `plain_layer`."""
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm == "head")
    submodules_of(layer.submodules.mlp).activation_func = GatedActivation
    attention = layer.submodules.self_attention
    attention.module = TensorParallelSelfAttention
    attention.params |= {"spec": spec, "rope": _rope(spec, rope)}
    return layer


def plain_layer(spec: ModelSpec, rope: str | None) -> ModuleSpec:
    """Return a layer of megatron-core with our attention and norm, and `rope` of `spec.ropes`."""
    add = get_bias_dropout_add
    if spec.residual_multiplier != 1.0:
        add = scaled_add(spec.residual_multiplier)
    norm = _norm(spec) if spec.norms_before else IdentityOp

    return ModuleSpec(
        module=ScaledLayer if spec.scales_layers else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_attention(spec, rope),
            self_attn_bda=add,
            pre_mlp_layernorm=norm,
            mlp=dense_mlp(_mlp(spec, spec.mlp_bias)),
            mlp_bda=add,
            # Checkpoints carry TransformerEngine's names, so that either build reads the other's.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def _mlp(spec: ModelSpec, bias: bool) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=BiasedColumnLinear if bias else ColumnLinear,
        activation_func=GatedActivation if spec.activation == "silu" else GeluGatedActivation,
        linear_fc2=_row_linear(spec, bias),
    )


def _attention(spec: ModelSpec, rope: str | None) -> ModuleSpec:
    if spec.latent is not None:
        params = {"latent": spec.latent, "rope": _rope(spec, rope)}
        return ModuleSpec(module=LatentSelfAttention, params=params)
    head_norm = _norm(spec) if spec.qk_norm == "head" else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=KeysAsValuesLinear if spec.keys_are_values else ColumnLinear,
        core_attention=CoreAttention,
        linear_proj=_row_linear(spec, spec.o_bias),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )

    return ModuleSpec(
        module=(
            ProjectionNormAttention if spec.qk_norm == "projection" else TensorParallelSelfAttention
        ),
        params={
            "attn_mask_type": AttnMaskType.causal,
            "spec": spec,
            "rope": _rope(spec, rope),
        },
        submodules=submodules,
    )


# By what is added to its weight: a norm alone, and one after a linear layer.
_NORMS: dict[float | None, tuple[type[RMSNorm], type[NormedRowLinear]]] = {
    None: (RMSNorm, NormedRowLinear),
    0.0: (WideRMSNorm, NormedWideRowLinear),
    1.0: (RMSNormPlusOne, NormedPlusOneRowLinear),
}


def _norm(spec: ModelSpec) -> type[RMSNorm]:
    return _NORMS[spec.norm_offset][0]


def _rope(spec: ModelSpec, kind: str | None) -> Rope | None:
    return None if kind is None else rope_of(spec, kind)


def _row_linear(spec: ModelSpec, bias: bool) -> type[RowLinear]:
    assert not (bias and spec.norms_after), "a bias is not normalised"
    if spec.norms_after:
        return _NORMS[spec.norm_offset][1]
    return BiasedRowLinear if bias else RowLinear


def scaled_add(multiplier: float) -> Callable[..., Any]:
    """Return megatron-core's `get_bias_dropout_add` without dropout, with the addend multiplied."""

    def get_add(training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(
            output_and_bias: tuple[Tensor, None], residual: Tensor, probability: float
        ) -> Tensor:
            output, bias = output_and_bias
            assert bias is None and probability == 0.0
            return residual + output * multiplier

        return add

    return get_add
