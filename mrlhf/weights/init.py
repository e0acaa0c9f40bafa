"""Random weights that do not depend on the layout: each named tensor is drawn whole from a
generator of its own.

The generator is seeded by a hash of the run's seed and the tensor's name, so a rank that holds any
slice of a tensor sees the same numbers. One full tensor at a time is in memory. It does not know
models: names say what a tensor is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlhf.weights.shard import Shape, Slot


def initialise(
    slots: Sequence[Slot],
    shapes: Mapping[str, Shape],
    seed: int,
    std: float = 0.02,
    head_std: float = 0.02,
) -> None:
    """Fill `slots`: norms 1, biases 0, matrices N(0, std), as transformers initialises these
    families.

    Args:
        slots: what to fill; may be a part of the model.
        shapes: name and full shape of every tensor of the whole model.
        seed: of the run.
        std: standard deviation of the matrices; `initializer_range` of a `config.json`.
        head_std: standard deviation of a scalar head, `score.weight`; at 0 it predicts 0
            everywhere.
    """
    by_name: dict[str, list[Slot]] = {}
    for slot in slots:
        by_name.setdefault(slot.piece.name, []).append(slot)
    for name, holders in by_name.items():
        whole = _draw(name, shapes[name], seed, head_std if name == "score.weight" else std)
        for slot in holders:
            piece = slot.piece
            view = slot.view(piece.start, piece.stop)
            view.copy_(
                whole.narrow(piece.dim, piece.start, piece.stop - piece.start).reshape(view.shape)
            )


def _draw(name: str, shape: Shape, seed: int, std: float) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * std
