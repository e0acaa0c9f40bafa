"""Builds one rank's pipeline stage of a model, and says where each named tensor lies in it.

All weights of a new stage are zero: they are always loaded later. TransformerEngine's layers are
used on a GPU if they can be imported. The family says what the layers are; this file knows no
family, no optimizer and no data.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from mrlhf.device import Device
from mrlhf.models.families import family_of
from mrlhf.models.heads import GPTHiddenModel, GPTScalarModel
from mrlhf.models.parameters import chunk_of
from mrlhf.models.scaling import scale_embeddings
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.layout import Coordinates, ParallelLayout
from mrlhf.weights.shard import Slot, pieces_of

Recompute = Literal["none", "full", "core_attn", "mlp"]


class BuiltModel(NamedTuple):
    """One rank's stage of a model.

    Attributes:
        config: megatron-core's configuration, which the schedules and the optimizer share.
        module: what schedules and DistributedDataParallel take: a GPTModel, which is wrapped in a
            Float16Module if its dtype is bfloat16. Its last stage gives hidden states, or one
            number for each token, in its dtype.
    """

    config: TransformerConfig
    module: torch.nn.Module


class HalfPrecision(Float16Module):
    """A Float16Module that gives what the model gives, without a copy of it in float32."""

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        """The output of the model."""
        return super().forward(*inputs, fp32_output=False, **arguments)


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
        dtype: dtype of parameters and activations, float32 or bfloat16.
        device: where the parameters live.
        sequence_parallel: split the activations between layers over the tensor-parallel ranks. A
            packed micro-batch must then hold a multiple of tp tokens. No effect if tp is 1.
        recompute: which activations are computed again in the backward pass.
    """
    layout = groups.layout
    config = transformer_config(
        spec, layout, dtype=dtype, sequence_parallel=sequence_parallel, recompute=recompute
    )
    chunk = chunk_of(spec, layout, groups.coordinates)
    transformer_engine = HAVE_TE and device.kind == "cuda"
    decoder = family_of(spec).decoder_spec(spec, chunk, transformer_engine)

    _prepare_megatron()
    model_class = GPTHiddenModel if spec.head == "lm" else GPTScalarModel
    model = model_class(
        config=config,
        transformer_layer_spec=decoder,
        vocab_size=spec.padded_vocab(layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=chunk.is_first,
        post_process=chunk.is_last,
        share_embeddings_and_output_weights=spec.output_is_embedding,
        position_embedding_type="none",  # each layer rotates by itself
        pg_collection=groups.collection,
    )

    if chunk.is_first:
        scale_embeddings(model.embedding, spec.embedding_multiplier)
    model.to(device.torch_device)
    module = HalfPrecision(config, model) if dtype == torch.bfloat16 else model
    return BuiltModel(config, module)


def slots_of(
    module: torch.nn.Module, spec: ModelSpec, layout: ParallelLayout, coordinates: Coordinates
) -> list[Slot]:
    """Every named slice that the stage holds, and where it is stored, parameter by parameter.

    `module` may be wrapped in a Float16Module or a DistributedDataParallel. The last stage of a
    model with tied embeddings has its own copy of the embedding, which is a slot like any other.
    """
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    chunk = chunk_of(spec, layout, coordinates)
    dense = (coordinates.tp, layout.tp)
    of_expert = (coordinates.etp, layout.etp)

    slots = []
    for name, parameter in unwrap_model(module).named_parameters():
        rule = family.rule_of(spec, chunk, name)
        for piece in pieces_of(name, rule, shapes, *(of_expert if rule.of_expert else dense)):
            slots.append(Slot(piece, parameter))
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
    model_options = family_of(spec).megatron_options(spec)
    recompute_options = _recompute_options(recompute)

    return TransformerConfig(
        **model_options,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Packed micro-batches differ in length. megatron-core then insists on this dispatcher, even
        # for a model without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Weights are loaded later; zeros also make the padding rows of the vocabulary harmless.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        bias_activation_fusion=False,
        use_te_activation_func=True,  # the activation is the one that the layer's spec names
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],  # the default warns that it is deprecated
        **recompute_options,
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


def _prepare_megatron() -> None:
    """Make the two objects that megatron-core's layers expect once in each process.

    Initialising weights forks a named random state, although ours draws nothing from it. Sequence
    parallelism gathers into a scratch buffer. Neither is a process group.
    """
    tracker = get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        tracker.add("model-parallel-rng", seed=0)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
