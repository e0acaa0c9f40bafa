"""The engine's parameters: named, cut and fused as in megatron-core, on one pipeline stage.

A parameter is either bound, so that it is a training parameter and nothing is copied, or stored
here. This file does not know how weights arrive, or what is computed from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlhf.inference.checks import check_tensor
from mrlhf.models.families import family_of
from mrlhf.models.parameters import engine_cuts, keeps_float32
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import ReplicaPlace
from mrlhf.weights.shard import Piece, Shape, Slot, local_shape, pieces_of

_EXPERT = re.compile(r"\.experts\.\d+\.")


class Parameters:
    """The parameters that one rank of a replica holds; `pieces` has the named slices of each.

    No memory is used until a parameter is bound or stored. Some stay float32 in models of any
    `dtype`.
    """

    def __init__(
        self, spec: ModelSpec, place: ReplicaPlace, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._device = device
        self._dtype = dtype
        self.place = place
        self.lora = spec.lora
        cuts = engine_cuts(spec, place)
        shapes = family_of(spec).tensor_shapes(spec)
        self.pieces: dict[str, tuple[Piece, ...]] = {}
        self._shapes: dict[str, Shape] = {}
        for name, cut in cuts.items():
            self.pieces[name] = pieces_of(name, cut.rule, shapes, cut.part, cut.parts)
            self._shapes[name] = local_shape(cut.rule, shapes, cut.parts)
        self._tensors: dict[str, Tensor] = {}
        self._bound: set[str] = set()
        self._of_base: dict[str, Any] = {}
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def missing(self) -> list[str]:
        """The parameters that have no storage yet."""
        return [name for name in self._shapes if name not in self._tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, bound, stored or missing."""
        sizes = (
            math.prod(self._shapes[name]) * self._dtype_of(name).itemsize for name in self._shapes
        )
        return sum(sizes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the parameters that are stored here."""
        return sum(self._tensors[name].nbytes for name in self._tensors.keys() - self._bound)

    def bind(self, name: str, tensor: Tensor) -> None:
        """Make `tensor` itself the parameter `name`; EngineError if there is none that it fits."""
        check_tensor(name, tensor, self._shapes, self._dtype_of(name), self._device)
        self._tensors[name] = tensor
        self._bound.add(name)
        self._of_base.pop(name, None)

    def made_of(self, name: str, make: Callable[[], Any]) -> Any:
        """The form that `make` gives a parameter that no version changes beside its adapters.

        With adapters it is made once, and again after the parameter is bound or stored anew. Laying
        out a base for each version took a seventh of a short step on a CPU.
        """
        if self.lora is None:
            return make()
        if name not in self._of_base:
            self._of_base[name] = make()
        return self._of_base[name]

    def kept(self, name: str, copy: Tensor) -> Tensor:
        """The `copy`, made for this version, where the last one of its `name` lies for graphs."""
        if not copy.is_cuda:
            return copy
        place = self._kept.setdefault(name, copy)
        return place if place is copy else place.copy_(copy)

    def free(self, keeps: Callable[[str], bool]) -> None:
        """Free the parameters stored here, except those of which it `keeps` all tensors."""
        for name in self._tensors.keys() - self._bound:
            if not all(keeps(piece.name) for piece in self.pieces[name]):
                del self._tensors[name]

    def slots(self) -> list[Slot]:
        """Return where each piece is stored.

        Parameters without storage get it, filled with zeros, so that padding rows are zero.
        """
        for names in _stacks(self.missing):
            shape = (len(names), *self._shapes[names[0]])
            stack = torch.zeros(shape, dtype=self._dtype_of(names[0]), device=self._device)
            self._tensors.update(zip(names, stack, strict=True))
            for name in names:
                self._of_base.pop(name, None)
        return [
            Slot(piece, self._tensors[name])
            for name, pieces in self.pieces.items()
            for piece in pieces
        ]

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if keeps_float32(name) else self._dtype


def _stacks(names: Sequence[str]) -> list[list[str]]:
    """Group the parameters that are stored in one tensor: the experts of a layer, others alone."""
    # On a GPU the products of experts are computed at once, from that tensor.
    stacks: dict[str, list[str]] = {}
    for name in names:
        stacks.setdefault(_EXPERT.sub(".experts.", name), []).append(name)
    return list(stacks.values())
