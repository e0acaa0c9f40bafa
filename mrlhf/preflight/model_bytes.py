"""The bytes that a model takes on a rank while it is trained, from shapes alone.

What megatron-core adds so that buffers divide over replicas, and padded rows of a vocabulary, are
not counted. This file knows no tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from mrlhf.models.families import Chunk
from mrlhf.models.lora import MODULE, is_adapter
from mrlhf.models.parameters import (
    alike_parts,
    chunks_of,
    is_hidden_matrix,
    never_trains,
    part_pieces,
    trained_tensors,
    weight_bytes,
)
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import EXPERT_REPLICA_AXES, REPLICA_AXES, ParallelLayout


@dataclass(frozen=True)
class ModelBytes:
    """The bytes of one model on one rank, by owner."""

    weights: int
    gradients: int  # in float32, of the weights that are trained
    optimizer: int  # moments, and main weights where the weights are not float32

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


@lru_cache(maxsize=4096)
def training_bytes(
    spec: ModelSpec,
    layout: ParallelLayout,
    itemsize: int,
    splits_optimizer: bool,
    is_muon: bool = False,
    stage: int | None = None,
) -> ModelBytes:
    """The bytes of a model that is trained, on a rank of `stage`, or on the rank that has most.

    `itemsize` is that of a weight; replicas may split the optimizer's states.
    """
    cut = (layout.tp, layout.etp)
    replicas = (1, 1)
    if splits_optimizer:
        replicas = (layout.group_size(*REPLICA_AXES), layout.group_size(*EXPERT_REPLICA_AXES))

    every = []
    for number in range(layout.pp) if stage is None else [stage]:
        sizes = [0, 0, 0]
        for part, times in parts_of(spec, layout, number).items():
            own = _of_part(spec, part, cut, replicas, itemsize, is_muon)
            sizes = [size + times * more for size, more in zip(sizes, own, strict=True)]
        every.append(ModelBytes(*sizes))
    return max(every, key=lambda sizes: sizes.total)


@lru_cache(maxsize=4096)
def merged_bytes(
    spec: ModelSpec, layout: ParallelLayout, itemsize: int, stage: int | None = None
) -> int:
    """The bytes of weights with adapters, merged into copies; `stage` as in `training_bytes`."""
    most = 0
    for number in range(layout.pp) if stage is None else [stage]:
        count = 0
        for part, times in parts_of(spec, layout, number).items():
            pieces = part_pieces(spec, part, layout.tp, layout.etp)
            factors = [piece.parameter for piece in pieces if is_adapter(piece.name)]
            # A parameter that holds several layers is merged whole.
            merged = {name.partition(f"{MODULE}.")[0] + "weight" for name in factors}
            held = [piece for piece in pieces if piece.parameter in merged]
            count += times * sum(math.prod(piece.shape(piece.start, piece.stop)) for piece in held)
        most = max(most, itemsize * count)
    return most


@lru_cache(maxsize=4096)
def parts_of(spec: ModelSpec, layout: ParallelLayout, stage: int) -> Counter[Chunk]:
    """The parts of a model, as of `alike_parts`, on the first rank of a stage."""
    return alike_parts(spec, chunks_of(spec, layout, layout.coordinates(layout.rank_at(pp=stage))))


@lru_cache(maxsize=4096)
def _of_part(
    spec: ModelSpec,
    part: Chunk,
    cut: tuple[int, int],
    replicas: tuple[int, int],
    itemsize: int,
    is_muon: bool,
) -> tuple[int, int, int]:
    """Weights, gradients and states of a part, of which a rank has one of tp and etp cuts.

    `replicas` share out the states of dense weights, and of experts.
    """
    trained = trained_tensors(spec)
    weights = gradients = optimizer = 0

    for piece in part_pieces(spec, part, *cut):
        count = math.prod(piece.shape(piece.start, piece.stop))
        weights += weight_bytes(piece, itemsize)
        if piece.name in trained and not never_trains(piece.parameter):
            moments = 1 if is_muon and is_hidden_matrix(piece.parameter) else 2
            states = 4 * (moments + (itemsize < 4))
            gradients += 4 * count
            optimizer += -(-states * count // replicas[piece.of_expert])
    return weights, gradients, optimizer
