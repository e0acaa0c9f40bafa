"""Merges a model's adapters into its base: W + scale * B A, computed in float32 and rounded once.

Each rank merges its own slices; nothing travels. This file does not know who takes the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.models.adapters import Adapters
from mrlhf.models.lora import is_adapter
from mrlhf.parallel.layout import EXPERT_REPLICA_AXES, REPLICA_AXES
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.hf import FileOptions, write_weights
from mrlhf.weights.shard import Shape, Slot


@dataclass(frozen=True)
class _Layer:
    """A parameter with adapters."""

    adapters: Adapters
    weight: Tensor  # the base's
    merged: Tensor
    copies: int  # how many ranks hold this slice


class MergedWeights:
    """The weights of a model whose adapters are merged, as those of its base.

    Attributes:
        slots: the places of the base's slices. Those of layers with adapters are in buffers of
            their own, which `update` fills; the others are where training has them.
    """

    def __init__(self, engine: ModelEngine) -> None:
        """Make the buffers, once the model's optimizer is attached, if it gets one."""
        self._engine = engine
        base = [slot for slot in engine.slots if not is_adapter(slot.piece.name)]
        layout = engine.groups.layout
        copies: dict[Tensor, int] = {}
        for slot in base:
            axes = EXPERT_REPLICA_AXES if slot.piece.of_expert else REPLICA_AXES
            copies[slot.parameter] = layout.group_size(*axes)

        self._layers: list[_Layer] = []
        for chunk in engine.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Adapters):
                    weight: Tensor = chunk.get_submodule(name.rpartition(".")[0]).weight
                    merged = torch.empty_like(weight, requires_grad=False)
                    self._layers.append(_Layer(module, weight, merged, copies[weight]))
        buffers = {layer.weight: layer.merged for layer in self._layers}
        self.slots = [
            replace(slot, parameter=buffers.get(slot.parameter, slot.parameter)) for slot in base
        ]

    @torch.no_grad()
    def update(self) -> Tensor:
        """Merge the adapters as they are now.

        Returns:
            float64 [2] on the host, to be summed over all ranks: the squares of what rounding
            changed of the sums scale * B A, and the squares of those sums.
        """
        self._engine.wait_for_weights()
        squares = torch.zeros(2, dtype=torch.float64, device=self._engine.device)
        for layer in self._layers:
            weight = layer.weight.float()
            added = layer.adapters.added_to_weight()
            layer.merged.copy_(weight + added)
            lost = layer.merged.float() - weight - added
            for number, part in enumerate((lost, added)):
                squares[number] += part.double().square().sum() / layer.copies
        return squares.cpu()


def export_merged(engine: ModelEngine, path: Path, max_shard_bytes: int) -> None:
    """Write the merged model, without its configuration; every rank calls this."""
    writers = engine.groups.first_copy
    if writers is not None:
        slots = merged_slots(engine)
        write_weights(path, slots, base_shapes(engine), writers, FileOptions(max_shard_bytes))


def base_shapes(engine: ModelEngine) -> dict[str, Shape]:
    """Return name and full shape of every tensor of the model but its adapters."""
    shapes = engine.tensor_shapes.items()
    return {name: shape for name, shape in shapes if not is_adapter(name)}


def merged_slots(engine: ModelEngine) -> list[Slot]:
    """Return the slots of the model's base with its adapters merged into new buffers."""
    merged = MergedWeights(engine)
    merged.update()
    return merged.slots
