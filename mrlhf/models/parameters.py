"""Which parameters, and which pieces of named tensors, each rank holds: from a spec and a layout.

No model is built for this. The names are those of the build without TransformerEngine; with it, two
norms of each layer have other parameter names and the same named slices. Pure: this file knows no
tensors and no process groups.
"""

from __future__ import annotations

from dataclasses import replace

from mrlhf.models.families import Chunk, family_of
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import EngineLayout, ParallelLayout
from mrlhf.weights.shard import Piece, Rule, pieces_of


def chunk_of(spec: ModelSpec, layout: ParallelLayout, stage: int) -> Chunk:
    """The part of the model on pipeline stage `stage`."""
    return Chunk(
        layers=layout.stage_layers(stage, spec.num_layers),
        is_first=stage == 0,
        is_last=stage == layout.pp - 1,
    )


def parameter_names(spec: ModelSpec, layout: ParallelLayout, stage: int) -> list[str]:
    """Names in `GPTModel.named_parameters()` of pipeline stage `stage`; layers from 0."""
    return family_of(spec).parameter_names(spec, chunk_of(spec, layout, stage))


def role_pieces(spec: ModelSpec, layout: ParallelLayout, rank: int) -> list[Piece]:
    """The pieces that global rank `rank` of a role holds, parameter by parameter."""
    coordinates = layout.coordinates(rank)
    chunk = chunk_of(spec, layout, coordinates.pp)
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)

    pieces: list[Piece] = []
    for name in family.parameter_names(spec, chunk):
        rule = family.rule_of(spec, chunk, name)
        pieces += pieces_of(name, rule, shapes, coordinates.tp, layout.tp)
    return pieces


def engine_pieces(spec: ModelSpec, layout: EngineLayout, rank: int) -> list[Piece]:
    """The pieces that global rank `rank` of an inference engine holds: one stage, all layers."""
    _, tp_rank = layout.place(rank)
    shapes = family_of(spec).tensor_shapes(spec)

    pieces: list[Piece] = []
    for name, rule in engine_rules(spec).items():
        pieces += pieces_of(name, rule, shapes, tp_rank, layout.tp)
    return pieces


def engine_rules(spec: ModelSpec) -> dict[str, Rule]:
    """The rule of each parameter of an inference engine, which has one pipeline stage.

    They are training's, except that an engine may have more ranks than KV heads; its ranks then
    share them.
    """
    family = family_of(spec)
    whole = Chunk(range(spec.num_layers), is_first=True, is_last=True)

    rules = {}
    for name in family.parameter_names(spec, whole):
        rule = family.rule_of(spec, whole, name)
        if len(rule.names) > 1:
            rule = replace(rule, shared_kv_heads=rule.periods)
        rules[name] = rule
    return rules
