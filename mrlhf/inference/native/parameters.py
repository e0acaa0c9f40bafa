"""The engine's parameters: named, cut and fused as in megatron-core, on one pipeline stage.

A parameter is either bound, so that it is a training parameter and nothing is copied, or stored
here. This file does not know how weights arrive or what is computed from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.inference.checks import check_tensor
from mrlhf.models.families import family_of
from mrlhf.models.parameters import engine_rules
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Piece, Slot, local_shape, pieces_of


class Parameters:
    """One tensor-parallel rank's shard of a model.

    Attributes:
        pieces: which named slices each parameter holds.
    """

    def __init__(
        self, spec: ModelSpec, tp_rank: int, tp_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Work out names and shapes; no memory is used until a parameter is bound or stored.

        Args:
            spec: a language model.
            tp_rank: which rank of the replica this is.
            tp_size: how many there are.
            device: where parameters are.
            dtype: their dtype.
        """
        self._device = device
        self._dtype = dtype
        rules = engine_rules(spec)
        shapes = family_of(spec).tensor_shapes(spec)
        self.pieces: dict[str, tuple[Piece, ...]] = {
            name: pieces_of(name, rule, shapes, tp_rank, tp_size) for name, rule in rules.items()
        }
        self._shapes = {name: local_shape(rule, shapes, tp_size) for name, rule in rules.items()}
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def missing(self) -> list[str]:
        """The parameters that have no storage yet."""
        return [name for name in self._shapes if name not in self._tensors]

    def bind(self, name: str, tensor: Tensor) -> None:
        """Make `tensor` itself the parameter `name`.

        Raises:
            EngineError: there is no such parameter, or the tensor does not fit it.
        """
        check_tensor(name, tensor, self._shapes, self._dtype, self._device)
        self._tensors[name] = tensor

    def slots(self) -> list[Slot]:
        """Where each piece is stored.

        Parameters that have no storage get some, filled with zeros, so that padding rows are zero.
        """
        for name in self.missing:
            self._tensors[name] = torch.zeros(
                self._shapes[name], dtype=self._dtype, device=self._device
            )
        return [
            Slot(piece, self._tensors[name])
            for name, pieces in self.pieces.items()
            for piece in pieces
        ]
