"""Merges a model's adapters into its base: W + scale * B A, computed in float32 and rounded once.

Each rank merges its own slices; nothing travels. This file does not know who takes the weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.models.adapters import Adapters, WholeAdapters
from mrlhf.models.families import family_of
from mrlhf.models.lora import is_adapter
from mrlhf.parallel.layout import EXPERT_REPLICA_AXES, REPLICA_AXES
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.hf import FileOptions, write_weights
from mrlhf.weights.shard import Shape, Slot


class MergedWeights:
    """The weights of a model whose adapters are merged, as those of its base.

    Attributes:
        slots: the places of the base's slices. Those of layers with adapters are in buffers of
            their own, which `update` fills; the others are where training has them.
    """

    def __init__(self, engine: ModelEngine) -> None:
        """Make the buffers, once the model's optimizer is attached, if it gets one."""
        self._engine = engine
        self._adapters: dict[Tensor, Adapters] = {}  # by the weight that they belong to
        for chunk in engine.chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Adapters):
                    owner = chunk.get_submodule(name.rpartition(".")[0])
                    self._adapters[owner.weight] = module

        self._merged = {weight: torch.empty_like(weight).detach() for weight in self._adapters}
        self.slots = [
            replace(slot, parameter=self._merged.get(slot.parameter, slot.parameter))
            for slot in engine.slots
            if not is_adapter(slot.piece.name)
        ]

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers on this rank."""
        return sum(buffer.nbytes for buffer in self._merged.values())

    @torch.no_grad()
    def update(self) -> Tensor:
        """Merge the adapters as they are now.

        Returns:
            float64 [2] on the host, to be summed over all ranks: the squares of what rounding
            changed of the sums scale * B A, and the squares of those sums.
        """
        self._engine.wait_for_weights()
        layout = self._engine.groups.layout
        squares = torch.zeros(2, dtype=torch.float64, device=self._engine.device)
        for weight, adapters in self._adapters.items():
            added = adapters.added_to_weight()
            merged = self._merged[weight].copy_(weight.float() + added)
            lost = merged.float() - weight.float() - added

            axes = EXPERT_REPLICA_AXES if adapters.of_expert else REPLICA_AXES
            both = torch.stack([lost.double().square().sum(), added.double().square().sum()])
            copies = layout.group_size(*axes)  # so many ranks have the same slice
            if isinstance(adapters, WholeAdapters):
                copies *= layout.tp
            squares += both / copies
        return squares.cpu()


def export_merged(engine: ModelEngine, path: Path, max_shard_bytes: int) -> None:
    """Write the merged model, without its configuration; every rank calls this."""
    writers = engine.groups.first_copy
    if writers is not None:
        with engine.residency.needing("params"):
            slots = merged_slots(engine)
            forms = family_of(engine.spec).written_forms(engine.spec)
            options = FileOptions(max_shard_bytes, forms=forms)
            write_weights(path, slots, base_shapes(engine), writers, options)


def base_shapes(engine: ModelEngine) -> dict[str, Shape]:
    """Return name and full shape of every tensor of the model but its adapters."""
    shapes = engine.tensor_shapes.items()
    return {name: shape for name, shape in shapes if not is_adapter(name)}


def merged_slots(engine: ModelEngine) -> list[Slot]:
    """Return the slots of the model's base with its adapters merged into new buffers."""
    merged = MergedWeights(engine)
    merged.update()
    return merged.slots
