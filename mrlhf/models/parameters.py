"""Which parameters, and which pieces of named tensors, each rank holds: from a spec and a layout,
with no model built.

It speaks of megatron-core's local layer spec; under TransformerEngine two norms a layer have other
parameter names and the same named slices. Pure: it knows no tensors and no process groups.
"""

from __future__ import annotations

from dataclasses import replace

from mrlhf.models.families import rule_of, tensor_shapes
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import EngineLayout, ParallelLayout
from mrlhf.weights.shard import Piece, Rule, pieces_of


def parameter_names(spec: ModelSpec, layout: ParallelLayout, stage: int) -> list[str]:
    """Names in `GPTModel.named_parameters()` of pipeline stage `stage`, with local layer numbers.

    The last of several stages has an output layer even where embeddings are tied: a copy of the
    embedding.
    """
    first, last = stage == 0, stage == layout.pp - 1
    names = ["embedding.word_embeddings.weight"] if first else []
    for layer in range(len(layout.stage_layers(stage, spec.num_layers))):
        names += [f"decoder.layers.{layer}.{name}" for name in _layer_parameters(spec)]
    if last:
        names.append("decoder.final_layernorm.weight")
        if not (spec.output_is_embedding and first):
            names.append("output_layer.weight")
    return names


def role_pieces(spec: ModelSpec, layout: ParallelLayout, rank: int) -> list[Piece]:
    """The pieces that global rank `rank` of a role holds, parameter by parameter."""
    at, shapes = layout.coordinates(rank), tensor_shapes(spec)
    offset = layout.stage_layers(at.pp, spec.num_layers).start
    return [
        piece
        for name in parameter_names(spec, layout, at.pp)
        for piece in pieces_of(name, rule_of(spec, name, offset), shapes, at.tp, layout.tp)
    ]


def engine_pieces(spec: ModelSpec, layout: EngineLayout, rank: int) -> list[Piece]:
    """The pieces that global rank `rank` of an inference engine holds: one stage, all layers."""
    _, tp_rank = layout.place(rank)
    shapes = tensor_shapes(spec)
    return [
        piece
        for name, rule in engine_rules(spec, layout.tp).items()
        for piece in pieces_of(name, rule, shapes, tp_rank, layout.tp)
    ]


def engine_rules(spec: ModelSpec, tp: int) -> dict[str, Rule]:
    """The rule of each parameter of an inference engine on `tp` ranks.

    They are training's, except that the engine's ranks may outnumber the KV groups and then share
    them.
    """
    rules = {
        name: rule_of(spec, name, 0)
        for name in parameter_names(spec, ParallelLayout(tp=tp, pp=1, dp=1), 0)
    }
    return {name: replace(rule, shares=rule.periods) for name, rule in rules.items()}


def _layer_parameters(spec: ModelSpec) -> list[str]:
    attention = ["linear_proj.weight", "linear_qkv.weight"]
    if spec.qkv_bias:
        attention.append("linear_qkv.bias")
    if spec.qk_norm:
        attention += ["q_layernorm.weight", "k_layernorm.weight"]
    return [
        "input_layernorm.weight",
        *(f"self_attention.{name}" for name in attention),
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
