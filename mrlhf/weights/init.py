"""Draws random weights that do not depend on the layout.

Each named tensor is drawn whole, from a generator of its own, which is seeded by a hash of the
run's seed and the tensor's name. So every rank that holds a slice of a tensor sees the same
numbers. One full tensor at a time is in memory. This file does not know models: a tensor's name
says whether it is a norm, a bias, a number of a layer or of its heads, a factor of an adapter, or
another matrix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlhf.weights.shard import Shape, Slot

_NORMS = ("norm.weight", "norm_1.weight", "norm_2.weight")
_ONES = (
    *(".linear_attn.norm.weight", ".dt_bias"),
    *(".layer_scalar", ".router.scale", ".per_expert_scale"),
)


def initialise(
    slots: Sequence[Slot],
    shapes: Mapping[str, Shape],
    seed: int,
    std: float = 0.02,
    norm_offset: float = 0.0,
) -> None:
    """Fill `slots` with norms that multiply by 1, biases of 0 and matrices drawn from N(0, std), as
    transformers does, and adapters as peft does.

    `shapes` has the full shape of every tensor of the model, of which `slots` may be a part. `std`
    is `initializer_range` of a `config.json`; norms multiply by `norm_offset` + their weight, those
    of delta nets by the weight alone.
    """
    slots_by_name: dict[str, list[Slot]] = {}
    for slot in slots:
        slots_by_name.setdefault(slot.piece.name, []).append(slot)

    for name, holders in slots_by_name.items():
        whole = _draw(name, shapes[name], seed, std, norm_offset)
        for slot in holders:
            piece = slot.piece
            slot.store(whole.narrow(piece.dim, piece.start, piece.stop - piece.start))


def _draw(name: str, shape: Shape, seed: int, std: float, norm_offset: float) -> Tensor:
    if name.endswith(_ONES):
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    if name.endswith(_NORMS):
        return torch.full(shape, 1 - norm_offset, dtype=torch.float32, device="cpu")
    if name.endswith(("bias", ".lora_B.weight")) and not name.endswith(".router.bias"):
        return torch.zeros(shape, dtype=torch.float32, device="cpu")

    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    if name.endswith((".lora_A.weight", ".A_log")):
        drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        if name.endswith(".A_log"):
            return (16 - 16 * drawn).log()
        # Kaiming's rule as peft applies it: uniform within 1 / sqrt(in).
        return (2 * drawn - 1) / math.sqrt(shape[1])
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * std
