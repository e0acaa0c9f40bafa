"""The factors of the low-rank adapters of a parameter, which may hold several linear layers.

One product gives A x of all layers. A second one, with a matrix of blocks, puts what is added where
the parameter has the rows of each layer. Ranks that split the columns each add to their part of a
sum, so nothing more is exchanged. This file knows parameters, and no layers of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.inference.native.linear import Factors, Linear, with_added
from mrlhf.inference.native.parameters import Parameters
from mrlhf.models.lora import MODULE
from mrlhf.weights.shard import Piece, Slot


def adapted(parameters: Parameters, dtype: torch.dtype, weight: str, base: Linear) -> Linear:
    """Return the function `base` of the parameter `weight` with its adapters, in `dtype`."""
    added = factors_of(parameters, weight, dtype)
    if added is not None:
        added = Factors(*(parameters.kept(f"{weight} {i}", part) for i, part in enumerate(added)))
    return with_added(base, added)


def factors_of(parameters: Parameters, weight: str, dtype: torch.dtype) -> Factors | None:
    """Return the factors for a parameter in `dtype`; None if it has no adapters.

    The scale is multiplied into B. That rounds B once, in bfloat16 too, where the scale is no power
    of two: less than the product is rounded.
    """
    layers: dict[str, list[Piece]] = {}
    for piece in parameters.pieces[weight]:
        layers.setdefault(piece.name.removesuffix(".weight"), []).append(piece)

    firsts: list[Tensor] = []
    seconds: list[Tensor] = []
    for layer, pieces in layers.items():
        own = f"{weight.removesuffix('weight')}{MODULE}.{layer.rpartition('.')[2]}."
        if own + "lora_A" not in parameters.pieces:
            continue
        assert parameters.lora is not None
        second = parameters[own + "lora_B"].float() * parameters.lora.scale_of(layer)
        if pieces[0].dim == 0:  # else the parameter has the rows of B
            block = second.new_zeros(len(parameters[weight]), second.shape[1])
            for piece, of_second in zip(pieces, parameters.pieces[own + "lora_B"], strict=True):
                Slot(piece, block).store(Slot(of_second, second).load())
            second = block
        firsts.append(parameters[own + "lora_A"])
        seconds.append(second)
    if not firsts:
        return None
    return Factors(torch.cat(firsts).to(dtype), torch.cat(seconds, dim=1).to(dtype))
