"""Builds one rank's pipeline stage of a model from its spec and its role's groups, and says where
each tensor lies.

The stage comes out zero: weights are always loaded after. TransformerEngine's layers are used on a
GPU where they can be imported, megatron-core's own with our attention and norm elsewhere. It knows
neither optimizers nor data.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import unwrap_model

from mrlhf.device import Device
from mrlhf.models.attention import CoreAttention
from mrlhf.models.families import rule_of, tensor_shapes
from mrlhf.models.heads import GPTScalarModel
from mrlhf.models.norm import RMSNorm
from mrlhf.models.rope import inverse_frequencies
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.layout import Coordinates, ParallelLayout
from mrlhf.weights.shard import Slot, pieces_of

Recompute = Literal["none", "full", "core_attn", "mlp"]


class BuiltModel(NamedTuple):
    """One rank's stage of a model.

    Attributes:
        config: megatron-core's configuration, which the schedules and the optimizer share.
        module: what schedules and DistributedDataParallel take: a GPTModel, in bfloat16 wrapped in
            a Float16Module.
    """

    config: TransformerConfig
    module: torch.nn.Module


def build_model(
    spec: ModelSpec,
    groups: RoleGroups,
    *,
    dtype: torch.dtype,
    device: Device,
    sequence_parallel: bool,
    recompute: Recompute,
) -> BuiltModel:
    """This rank's stage of the model.

    Args:
        spec: the model; its heads and MLP divide over tp and its layers over pp.
        groups: the role's groups.
        dtype: of parameters and activations, float32 or bfloat16.
        device: where it lives.
        sequence_parallel: split activations between layers over the tensor-parallel ranks; no
            effect with one of them. A packed micro-batch must then hold a multiple of tp tokens.
        recompute: which activations are computed again in the backward pass.
    """
    layout = groups.layout
    config = transformer_config(
        spec, layout, dtype=dtype, sequence_parallel=sequence_parallel, recompute=recompute
    )
    _prepare_megatron()
    layer = _engine_layer(spec) if HAVE_TE and device.kind == "cuda" else _plain_layer(spec)
    num_layers = len(layout.stage_layers(groups.coordinates.pp, spec.num_layers))
    model_class = GPTModel if spec.head == "lm" else GPTScalarModel
    chunk = model_class(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * num_layers, layer_norm=RMSNorm
        ),
        vocab_size=spec.padded_vocab(layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=spec.output_is_embedding,
        position_embedding_type="rope",
        pg_collection=groups.collection,
    )
    chunk.rotary_pos_emb.inv_freq = inverse_frequencies(spec).to(device.torch_device)
    chunk.to(device.torch_device)
    module = Float16Module(config, chunk) if dtype == torch.bfloat16 else chunk
    return BuiltModel(config, module)


def slots_of(
    module: torch.nn.Module, spec: ModelSpec, layout: ParallelLayout, coordinates: Coordinates
) -> list[Slot]:
    """Every named slice that the stage holds and where, in the order of its parameters.

    `module` may be wrapped, in a Float16Module or a DistributedDataParallel. The last stage of a
    model with tied embeddings has its own copy of the embedding, which is a slot like any other.
    """
    chunk = unwrap_model(module)
    shapes = tensor_shapes(spec)
    first_layer = layout.stage_layers(coordinates.pp, spec.num_layers).start
    slots = []
    for name, parameter in chunk.named_parameters():
        rule = rule_of(spec, name, first_layer)
        slots += [
            Slot(piece, parameter)
            for piece in pieces_of(name, rule, shapes, coordinates.tp, layout.tp)
        ]
    return slots


def transformer_config(
    spec: ModelSpec,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: Recompute,
) -> TransformerConfig:
    """megatron-core's configuration of the model in this layout."""
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        # Also tells finalize_model_grads to sum the gradients of these norms over the
        # tensor-parallel group.
        qk_layernorm=spec.qk_norm,
        window_size=None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Packed micro-batches differ in length. megatron-core then insists on this dispatcher, even
        # without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Weights are loaded after; zeros also make the padding rows of the vocabulary harmless.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],  # the default warns that it is deprecated
        **_recompute_options(recompute),
    )


def _recompute_options(recompute: Recompute) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return {"recompute_granularity": "selective", "recompute_modules": [recompute]}


def _plain_layer(spec: ModelSpec) -> ModuleSpec:
    """A layer of megatron-core's linears with our attention and norm; needs torch alone."""
    head_norm = RMSNorm if spec.qk_norm else IdentityOp
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
                module=SelfAttention,
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


def _engine_layer(spec: ModelSpec) -> ModuleSpec:
    """A layer of TransformerEngine's modules."""
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)


def _prepare_megatron() -> None:
    """Two things of megatron-core that a whole process shares and that its layers expect, neither
    of them a group.

    Initialising weights forks a named random state, though ours draws nothing from it; sequence
    parallelism gathers into a scratch buffer.
    """
    tracker = get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        tracker.add("model-parallel-rng", seed=0)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
