"""Which parameters, and which pieces of named tensors, each rank holds: from a spec and a layout.

No model is built for this. The names are those of the build without TransformerEngine; with it, two
norms of each layer have other parameter names and the same named slices. Pure: this file knows no
tensors and no process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from mrlhf.models.families import Chunk, family_of
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import Coordinates, EngineLayout, ParallelLayout
from mrlhf.weights.shard import Piece, Rule, Shape, pieces_of


def chunks_of(spec: ModelSpec, layout: ParallelLayout, place: Coordinates) -> list[Chunk]:
    """The parts of the model on the rank at `place`, one for each virtual stage."""
    stages = layout.stages
    chunks = []
    for number in stages.numbers_on(place.pp):
        layers = stages.layers(number, spec.num_layers)
        chunks.append(Chunk(layers, is_first=number == 0, is_last=number == stages.count - 1))
    return chunks


def parameter_names(spec: ModelSpec, layout: ParallelLayout, place: Coordinates) -> list[str]:
    """Names of all parameters of the rank at `place`, chunk by chunk.

    They are those in `GPTModel.named_parameters()`, with layers from 0 in each chunk, behind the
    prefix of the chunk.
    """
    names = []
    for number, chunk in enumerate(chunks_of(spec, layout, place)):
        prefix = chunk_prefix(layout, number)
        names += [prefix + name for name in family_of(spec).parameter_names(spec, chunk)]
    return names


def chunk_prefix(layout: ParallelLayout, number: int) -> str:
    """What tells the parameters of a rank's chunk from those of its others; "" if it has one."""
    return "" if layout.vpp == 1 else f"{number}."


def role_pieces(spec: ModelSpec, layout: ParallelLayout, rank: int) -> list[Piece]:
    """The pieces that global rank `rank` of a role holds, parameter by parameter."""
    place = layout.coordinates(rank)
    pieces: list[Piece] = []
    for number, chunk in enumerate(chunks_of(spec, layout, place)):
        prefix = chunk_prefix(layout, number)
        pieces += _weight_map(spec, chunk).pieces(place.tp, layout.tp, prefix)
    return pieces


def engine_pieces(spec: ModelSpec, layout: EngineLayout, rank: int) -> list[Piece]:
    """The pieces that global rank `rank` of an inference engine holds: one stage, all layers."""
    _, tp_rank = layout.place(rank)
    return _engine_map(spec).pieces(tp_rank, layout.tp)


def engine_rules(spec: ModelSpec) -> Mapping[str, Rule]:
    """The rule of each parameter of an inference engine, which has one pipeline stage.

    They are training's, except that an engine may have more ranks than KV heads; its ranks then
    share them.
    """
    return _engine_map(spec).rules


@dataclass(frozen=True)
class _WeightMap:
    """The rule of each parameter of a chunk, and the shape of each tensor of the model."""

    rules: Mapping[str, Rule]
    shapes: Mapping[str, Shape]

    def pieces(self, tp_rank: int, tp_size: int, prefix: str = "") -> list[Piece]:
        """The pieces of one tensor-parallel rank, parameter by parameter.

        `prefix` goes before the name of each parameter.
        """
        pieces: list[Piece] = []
        for name, rule in self.rules.items():
            pieces += pieces_of(prefix + name, rule, self.shapes, tp_rank, tp_size)
        return pieces


# A plan asks for the pieces of every tensor-parallel rank; the rules are the same for all of them.
@lru_cache(maxsize=64)
def _weight_map(spec: ModelSpec, chunk: Chunk) -> _WeightMap:
    family = family_of(spec)
    names = family.parameter_names(spec, chunk)
    rules = {name: family.rule_of(spec, chunk, name) for name in names}
    return _WeightMap(rules, family.tensor_shapes(spec))


@lru_cache(maxsize=4)
def _engine_map(spec: ModelSpec) -> _WeightMap:
    whole = _weight_map(spec, Chunk(range(spec.num_layers), is_first=True, is_last=True))

    rules: dict[str, Rule] = {}
    for name, rule in whole.rules.items():
        shares_heads = len(rule.names) > 1
        rules[name] = replace(rule, shared_kv_heads=rule.periods) if shares_heads else rule
    return _WeightMap(rules, whole.shapes)
