"""The bytes that a model takes on a rank while it is trained, from shapes alone.

What megatron-core adds so that buffers divide over replicas, and padded rows of a vocabulary, are
not counted. This file knows no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mrlhf.models.families import family_of
from mrlhf.models.lora import MODULE, is_adapter, trained_shapes
from mrlhf.models.parameters import is_hidden_matrix, keeps_float32, role_pieces
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

    @property
    def by_owner(self) -> dict[str, int]:
        """The same under the names of the owners in `footprint`."""
        return {"params": self.weights, "grads": self.gradients, "optimizer": self.optimizer}


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
    stages = range(layout.pp) if stage is None else [stage]
    ranks = [layout.rank_at(pp=number) for number in stages]
    every = [_on_rank(spec, layout, rank, itemsize, splits_optimizer, is_muon) for rank in ranks]
    return max(every, key=lambda sizes: sizes.total)


def merged_bytes(
    spec: ModelSpec, layout: ParallelLayout, itemsize: int, stage: int | None = None
) -> int:
    """The bytes of weights with adapters, merged into copies; `stage` as in `training_bytes`."""
    most = 0
    for number in range(layout.pp) if stage is None else [stage]:
        pieces = role_pieces(spec, layout, layout.rank_at(pp=number))
        factors = [piece.parameter for piece in pieces if is_adapter(piece.name)]
        # A parameter that holds several layers is merged whole.
        merged = {name.partition(f"{MODULE}.")[0] + "weight" for name in factors}
        held = [piece for piece in pieces if piece.parameter in merged]
        count = sum(math.prod(piece.shape(piece.start, piece.stop)) for piece in held)
        most = max(most, itemsize * count)
    return most


def _on_rank(
    spec: ModelSpec,
    layout: ParallelLayout,
    rank: int,
    itemsize: int,
    splits_optimizer: bool,
    is_muon: bool,
) -> ModelBytes:
    family = family_of(spec)
    trained = trained_shapes(family.tensor_shapes(spec), spec, family.scalar_head)
    weights = gradients = optimizer = 0

    for piece in role_pieces(spec, layout, rank):
        count = math.prod(piece.shape(piece.start, piece.stop))
        stays_float32 = keeps_float32(piece.parameter)
        weights += count * (4 if stays_float32 else itemsize)
        if piece.name in trained and not stays_float32:
            axes = EXPERT_REPLICA_AXES if piece.of_expert else REPLICA_AXES
            replicas = layout.group_size(*axes) if splits_optimizer else 1
            moments = 1 if is_muon and is_hidden_matrix(piece.parameter) else 2
            states = 4 * (moments + (itemsize < 4))
            gradients += 4 * count
            optimizer += -(-states * count // replicas)
    return ModelBytes(weights, gradients, optimizer)
