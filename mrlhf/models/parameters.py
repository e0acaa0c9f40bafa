"""The parameters and the pieces of named tensors of each rank, computed from a spec and a layout.

No model is built for this. The names are those of the build without TransformerEngine; with it, two
norms of each layer have other parameter names and the same named slices. Pure: this file knows no
tensors and no process groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mrlhf.models.families import Chunk, family_of
from mrlhf.models.lora import trained_shapes
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout, ReplicaPlace
from mrlhf.parallel.layout import Coordinates, ParallelLayout
from mrlhf.weights.shard import Piece, Rule, Shape, pieces_of

# The ends of the names of linear layers' matrices, those aside that every rank has whole.
_SPLIT = ("qkv", "proj", "fc1", "fc2", "q_proj", "q_up_proj", "kv_up_proj")
_LINEAR = tuple(f".linear_{layer}.weight" for layer in _SPLIT)


def chunks_of(spec: ModelSpec, layout: ParallelLayout, place: Coordinates) -> list[Chunk]:
    """Return the parts of the model on the rank at `place`, one for each virtual stage."""
    stages = layout.stages
    experts = experts_of(spec, layout.ep, place.ep)
    chunks = []
    for number in stages.numbers_on(place.pp):
        layers = stages.layers(number, spec.num_layers)
        is_last = number == stages.count - 1
        chunks.append(Chunk(layers, number == 0, is_last, experts))
    return chunks


def experts_of(spec: ModelSpec, ep: int, ep_rank: int) -> range:
    """Return the numbers of the experts on one of `ep` ranks, which divides their number."""
    if spec.experts is None:
        return range(0)
    held = spec.experts.count // ep
    return range(ep_rank * held, (ep_rank + 1) * held)


def keeps_float32(parameter: str) -> bool:
    """Whether a parameter is float32 in models of any dtype: rounded, it chooses other experts."""
    return parameter.endswith((".router.correction", ".e_score_correction_bias"))


def never_trains(parameter: str) -> bool:
    """Whether no model trains a parameter."""
    is_fixed = parameter.endswith(".layer_scalar") or ".indexer." in parameter
    return keeps_float32(parameter) or is_fixed


def is_hidden_matrix(parameter: str) -> bool:
    """Whether it holds matrices of hidden layers: no embedding, output, router or gate."""
    return parameter.endswith(_LINEAR)


def weight_bytes(piece: Piece, itemsize: int) -> int:
    """Return the bytes of a piece of a model whose numbers have `itemsize` bytes."""
    size = 4 if keeps_float32(piece.parameter) else itemsize
    return size * math.prod(piece.shape(piece.start, piece.stop))


def carried_pieces(pieces: Iterable[Piece], itemsize: int) -> list[Piece]:
    """Return the pieces in the form in which they travel, in numbers of `itemsize` bytes.

    A float32 tensor travels among numbers of 2 bytes with a last dimension of 2 more: its bytes.
    """
    words = 4 // itemsize
    carried: list[Piece] = []
    for piece in pieces:
        if words > 1 and keeps_float32(piece.parameter):
            piece = piece._replace(full_shape=(*piece.full_shape, words))
        carried.append(piece)
    return carried


def parameter_names(spec: ModelSpec, layout: ParallelLayout, place: Coordinates) -> list[str]:
    """Return the names of all parameters of the rank at `place`, chunk by chunk.

    They are those in `GPTModel.named_parameters()`, with layers from 0 in each chunk, after the
    prefix of the chunk.
    """
    names = []
    for number, chunk in enumerate(chunks_of(spec, layout, place)):
        prefix = chunk_prefix(layout, number)
        names += [prefix + name for name in family_of(spec).parameter_names(spec, chunk)]
    return names


def chunk_prefix(layout: ParallelLayout, number: int) -> str:
    """Return the prefix of the parameters of a rank's chunk; "" if the rank has one chunk."""
    return "" if layout.vpp == 1 else f"{number}."


def role_pieces(spec: ModelSpec, layout: ParallelLayout, rank: int) -> list[Piece]:
    """Return the pieces that global rank `rank` of a role holds, parameter by parameter."""
    place = layout.coordinates(rank)
    pieces: list[Piece] = []
    for number, chunk in enumerate(chunks_of(spec, layout, place)):
        prefix = chunk_prefix(layout, number)
        pieces += _weight_map(spec, chunk).pieces(
            (place.tp, layout.tp), (place.etp, layout.etp), prefix
        )
    return pieces


def alike_parts(spec: ModelSpec, chunks: Iterable[Chunk]) -> Counter[Chunk]:
    """Return how often chunks hold each first layer of a kind, and what is beside layers."""
    first = _first_alike(spec)
    parts: Counter[Chunk] = Counter()
    for chunk in chunks:
        if chunk.is_first or chunk.is_last:
            parts[replace(chunk, layers=range(0))] += 1
        for layer in chunk.layers:
            kind = range(first[layer], first[layer] + 1)
            parts[Chunk(kind, is_first=False, is_last=False, experts=chunk.experts)] += 1
    return parts


def part_pieces(spec: ModelSpec, chunk: Chunk, tp: int, etp: int) -> list[Piece]:
    """Return the pieces of a chunk on the first of `tp` ranks, of which `etp` split an expert."""
    return _weight_map(spec, chunk).pieces((0, tp), (0, etp))


def engine_pieces(
    spec: ModelSpec, layout: EngineLayout, rank: int, tensors: Set[str] | None = None
) -> list[Piece]:
    """Return the pieces of an engine's rank `rank`, or those that hold some of `tensors`."""
    return pieces_at(spec, layout.place_in_replica(rank), None, tensors)


def pieces_at(
    spec: ModelSpec, place: ReplicaPlace, part: Chunk | None, tensors: Set[str] | None = None
) -> list[Piece]:
    """Return the same of a place in a replica, or of a part of the model there."""
    weights = _engine_map(spec, experts_of(spec, place.ep, place.ep_rank), part)
    return weights.pieces((place.tp_rank, place.tp), (place.etp_rank, place.etp), tensors=tensors)


def engine_parts(spec: ModelSpec, place: ReplicaPlace) -> Counter[Chunk]:
    """Return the parts of a whole model at a place of a replica, as `alike_parts`."""
    experts = experts_of(spec, place.ep, place.ep_rank)
    return alike_parts(spec, [Chunk(range(spec.num_layers), True, True, experts)])


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a rank holds."""

    rule: Rule  # how the parameter is made of named tensors
    part: int  # the number of the part
    parts: int  # how many parts there are


def engine_cuts(spec: ModelSpec, place: ReplicaPlace) -> dict[str, Cut]:
    """Return the parameters of one rank of an inference replica, which has one pipeline stage.

    Their rules are those of training, except that several ranks may share a KV head. The rank has
    the experts of its place.
    """
    cuts: dict[str, Cut] = {}
    experts = experts_of(spec, place.ep, place.ep_rank)
    for name, rule in _engine_map(spec, experts).rules.items():
        if rule.of_expert:
            cuts[name] = Cut(rule, place.etp_rank, place.etp)
        else:
            cuts[name] = Cut(rule, place.tp_rank, place.tp)
    return cuts


@dataclass(frozen=True)
class _WeightMap:
    """The rule of each parameter of a chunk, and the shape of each tensor of the model."""

    rules: Mapping[str, Rule]
    shapes: Mapping[str, Shape]

    def pieces(
        self,
        tp: tuple[int, int],
        etp: tuple[int, int],
        prefix: str = "",
        tensors: Set[str] | None = None,
    ) -> list[Piece]:
        """Return the pieces of one rank, parameter by parameter, with `prefix` before each name.

        `tp` and `etp` are its place and the number of places, for dense parameters and for experts.
        Only parameters that hold some of `tensors` are listed, if these are given.
        """
        cuts: dict[object, tuple[Piece, ...]] = {}
        pieces: list[Piece] = []
        for name in self.rules if tensors is None else self._holding(tensors):
            rule = self.rules[name]
            # Parameters of a kind are cut alike, as those of all experts are.
            kind = (*rule[1:], *map(self.shapes.__getitem__, rule.names))
            if kind not in cuts:
                cuts[kind] = pieces_of(name, rule, self.shapes, *(etp if rule.of_expert else tp))

            # A rank has a piece of each of several tensors, but may have none of a single one.
            parameter = prefix + name
            for cut, tensor in zip(cuts[kind], rule.names, strict=False):
                pieces.append(Piece(tensor, *cut[1:5], parameter, *cut[6:]))
        return pieces

    def _holding(self, tensors: Set[str]) -> list[str]:
        """Return the parameters that hold some of these tensors, in their order."""
        numbers = {number for name in tensors for number in self._index.get(name, ())}
        names = list(self.rules)
        return [names[number] for number in sorted(numbers)]

    @cached_property
    def _index(self) -> dict[str, list[int]]:
        """The numbers of the parameters that hold each tensor."""
        index: dict[str, list[int]] = {}
        for number, rule in enumerate(self.rules.values()):
            for name in rule.names:
                index.setdefault(name, []).append(number)
        return index


# A plan asks for the pieces of every tensor-parallel rank; the rules are the same for all of them.
@lru_cache(maxsize=64)
def _weight_map(spec: ModelSpec, chunk: Chunk) -> _WeightMap:
    family = family_of(spec)
    rules = family.rules_of(spec, chunk)
    names = family.parameter_names(spec, chunk)
    return _WeightMap({name: rules[name] for name in names}, _shapes(spec))


@lru_cache(maxsize=4)
def _shapes(spec: ModelSpec) -> Mapping[str, Shape]:
    return family_of(spec).tensor_shapes(spec)


@lru_cache(maxsize=8)
def trained_tensors(spec: ModelSpec) -> Set[str]:
    """Return the names of the tensors that train."""
    return trained_shapes(_shapes(spec), spec, family_of(spec).scalar_head).keys()


@lru_cache(maxsize=8)
def _first_alike(spec: ModelSpec) -> list[int]:
    """The first layer whose tensors have the same shapes and train too, for each layer."""
    trained = trained_tensors(spec)
    kinds: list[list[tuple[str, Shape, bool]]] = [[] for _ in range(spec.num_layers)]
    for name, shape in _shapes(spec).items():
        number, _, own = name.partition(".layers.")[2].partition(".")
        if own:
            kinds[int(number)].append((own, shape, name in trained))
    return [kinds.index(kind) for kind in kinds]


@lru_cache(maxsize=64)
def _engine_map(spec: ModelSpec, experts: range, part: Chunk | None = None) -> _WeightMap:
    part = part or Chunk(range(spec.num_layers), is_first=True, is_last=True)
    whole = _weight_map(spec, replace(part, experts=experts))

    rules: dict[str, Rule] = {}
    for name, rule in whole.rules.items():
        shares_heads = len(rule.names) > 1 or rule.of_kv_heads
        rules[name] = rule._replace(shared_kv_heads=rule.periods) if shares_heads else rule
    return _WeightMap(rules, whole.shapes)
