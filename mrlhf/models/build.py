"""Builds one rank's part of a model, and says where each named tensor lies in it.

All weights of a new part are zero: they are always loaded later. The family defines the layers;
this file knows no family, no optimizer and no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrlhf.config.sections import Recompute
from mrlhf.device import Device
from mrlhf.models.adapters import SplitRanks, make_adapters
from mrlhf.models.families import Chunk, family_of
from mrlhf.models.heads import GPTHiddenModel, GPTScalarModel
from mrlhf.models.linked_layers import GPTLinkedModel
from mrlhf.models.lora import trained_shapes
from mrlhf.models.parameters import chunk_prefix, chunks_of
from mrlhf.models.spec import ModelSpec
from mrlhf.models.transformer_engine import check_layer
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.layout import Coordinates, ParallelLayout
from mrlhf.parallel.stages import Stages
from mrlhf.weights.shard import Slot, pieces_of


class BuiltModel(NamedTuple):
    """One rank's part of a model.

    Attributes:
        config: megatron-core's configuration, which the schedules and the optimizer share.
        chunks: a GPTModel for each virtual stage of the rank, wrapped in a Float16Module if its
            dtype is bfloat16. The model's last one gives hidden states, or the numbers of each
            token, in its dtype.
    """

    config: TransformerConfig
    chunks: list[torch.nn.Module]


class HalfPrecision(Float16Module):
    """A Float16Module whose output is not copied to float32."""

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        """Return the output of the model."""
        return super().forward(*inputs, fp32_output=False, **arguments)


class LayerNumbers(PipelineParallelLayerLayout):
    """megatron-core's list of the layers of each stage, for one pipeline rank.

    megatron-core takes the rank's place from the one set of process groups that a process has
    there; our roles have different layouts.
    """

    def __init__(self, stages: Stages, rank: int, num_layers: int) -> None:
        counts = stages.split(num_layers)
        assert counts is not None, f"{num_layers} layers do not fit {stages}"
        listed = [["decoder"] * count for count in counts]
        listed[0].insert(0, "embedding")
        listed[-1].append("loss")
        super().__init__(listed, stages.pp)

        self._stages = stages
        self._numbers = stages.numbers_on(rank)
        self._num_layers = num_layers

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers before the first layer of virtual stage `vp_stage`."""
        assert layer_type is LayerType.decoder and pp_rank is None
        return self._stages.layers(self._numbers[vp_stage or 0], self._num_layers).start


def build_model(
    spec: ModelSpec,
    groups: RoleGroups,
    *,
    dtype: torch.dtype,
    device: Device,
    sequence_parallel: bool,
    recompute: Recompute,
    transformer_engine: bool = False,
) -> BuiltModel:
    """Build this rank's part of the model.

    Args:
        spec: the model; its heads and MLP divide over tp and its layers over the stages.
        dtype: dtype of parameters and activations, float32 or bfloat16.
        sequence_parallel: split the activations between layers over the tensor-parallel ranks. A
            packed micro-batch must then hold a multiple of tp tokens. No effect if tp is 1.
        recompute: which activations are computed again in the backward pass.
        transformer_engine: use TransformerEngine's layers, after one was tried.
    """
    layout = groups.layout
    place = groups.coordinates
    config = transformer_config(
        spec,
        layout,
        place.pp,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    _prepare_megatron()
    if transformer_engine:
        check_layer(spec, config, groups, device.torch_device)
    chunks = []
    for number, chunk in enumerate(chunks_of(spec, layout, place)):
        model = _build_chunk(spec, groups, config, chunk, number, transformer_engine)
        if spec.lora is not None:
            _adapt(model, spec, chunk, groups, config)
        if spec.keeps_weights:
            _freeze(model, spec, chunk)
        model.to(device.torch_device)
        chunks.append(HalfPrecision(config, model) if dtype == torch.bfloat16 else model)
    return BuiltModel(config, chunks)


def _build_chunk(
    spec: ModelSpec,
    groups: RoleGroups,
    config: TransformerConfig,
    chunk: Chunk,
    number: int,
    transformer_engine: bool,
) -> torch.nn.Module:
    """Build the chunk of virtual stage `number` of this rank."""
    layout = groups.layout
    scalar = partial(GPTScalarModel, outputs=spec.outputs)
    make: Callable[..., GPTModel] = GPTHiddenModel if spec.head == "lm" else scalar
    if spec.links_layers:
        make = partial(GPTLinkedModel, spec=spec)
    model = make(
        config=config,
        transformer_layer_spec=family_of(spec).decoder_spec(spec, chunk, transformer_engine),
        vocab_size=spec.padded_vocab(layout.tp),
        max_sequence_length=spec.max_positions,
        pre_process=chunk.is_first,
        post_process=chunk.is_last,
        share_embeddings_and_output_weights=spec.output_is_embedding,
        position_embedding_type="none",  # each layer rotates by itself
        pg_collection=groups.collection,
        vp_stage=number if layout.vpp > 1 else None,
    )

    if chunk.is_first and spec.embedding_multiplier != 1.0:  # which a GPTModel does not have
        scale = spec.embedding_scale(config.params_dtype)
        model.embedding.register_forward_hook(lambda module, inputs, output: output * scale)
    return model


def _adapt(
    model: torch.nn.Module,
    spec: ModelSpec,
    chunk: Chunk,
    groups: RoleGroups,
    config: TransformerConfig,
) -> None:
    """Add the chunk's adapters."""
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    rules = family.base_rules(spec, chunk)
    for name, _ in list(model.named_parameters()):
        rule = rules[name]
        group = groups.collection.expt_tp if rule.of_expert else groups.collection.tp
        ranks = SplitRanks(group, config.sequence_parallel, rule.of_expert)
        adapters = make_adapters(spec, shapes, name, rule, ranks, config.params_dtype)
        if adapters is not None:
            model.get_submodule(name.removesuffix(".weight")).adapters = adapters


def _freeze(model: torch.nn.Module, spec: ModelSpec, chunk: Chunk) -> None:
    """Freeze what does not train."""
    family = family_of(spec)
    trained = trained_shapes(family.tensor_shapes(spec), spec, family.scalar_head)
    rules = family.rules_of(spec, chunk)
    for name, parameter in model.named_parameters():
        if trained.keys().isdisjoint(rules[name].names):
            parameter.requires_grad_(False)

    if chunk.is_first:
        model.get_submodule("embedding").register_forward_hook(_with_gradient)


def _with_gradient(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """What the backward pass of a stage, or of a layer that is recomputed, needs as its input.

    The view has the strides of a fresh tensor. `transpose(0, 1)` leaves other ones at the dimension
    of 1 row, by which `torch.matmul` of a frozen weight chooses its kernel, and autograd takes
    views in some passes alone: log-probabilities before the update and in it would differ.
    """
    plain = output.view_as(output)
    return plain.requires_grad_() if torch.is_grad_enabled() else plain


def slots_of(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    layout: ParallelLayout,
    coordinates: Coordinates,
) -> list[Slot]:
    """Return every named slice that the rank holds, and where it is stored, parameter by parameter.

    A chunk may be wrapped in a Float16Module or a DistributedDataParallel. The last stage of a
    model with tied embeddings has its own copy of the embedding, which is a slot like any other.
    """
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    dense = (coordinates.tp, layout.tp)
    of_expert = (coordinates.etp, layout.etp)

    slots = []
    for number, chunk in enumerate(chunks_of(spec, layout, coordinates)):
        prefix = chunk_prefix(layout, number)
        rules = family.rules_of(spec, chunk)
        for name, parameter in unwrap_model(chunks[number]).named_parameters():
            rule = rules[name]
            place = of_expert if rule.of_expert else dense
            for piece in pieces_of(prefix + name, rule, shapes, *place):
                slots.append(Slot(piece, parameter))
    return slots


def transformer_config(
    spec: ModelSpec,
    layout: ParallelLayout,
    stage: int,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: Recompute,
) -> TransformerConfig:
    """Return megatron-core's configuration of the model, on pipeline rank `stage` of a layout."""
    model_options = family_of(spec).megatron_options(spec)
    recompute_options = _recompute_options(recompute)
    pipeline_options = _pipeline_options(spec, layout, stage)

    return TransformerConfig(
        **model_options,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
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
        gradient_accumulation_fusion=False,  # `data_parallel` sets it in each layer that can
        # TransformerEngine would overwrite sums of gradients in the first micro-batch after a cue.
        disable_parameter_transpose_cache=True,
        persist_layer_norm=False,
        cuda_graph_scope=[],  # the default warns that it is deprecated
        **recompute_options,
        **pipeline_options,
    )


def _pipeline_options(spec: ModelSpec, layout: ParallelLayout, stage: int) -> dict[str, Any]:
    if layout.pp == 1:
        return {}
    options: dict[str, Any] = {
        "pipeline_model_parallel_size": layout.pp,
        "pipeline_model_parallel_layout": LayerNumbers(layout.stages, stage, spec.num_layers),
        # It would wait for the GPU after each exchange, for old versions of torch.
        "batch_p2p_sync": False,
    }
    if layout.vpp == 1:
        return options

    # Between two stages, tensors travel in both directions, back to the next chunk of the first
    # rank too. Only exchanges of one direction each keep them apart.
    return options | {
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


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
