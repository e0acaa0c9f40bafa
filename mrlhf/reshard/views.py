"""The slices of one side of a reshard, as views into the tensors that store them.

Computing where a slice lies takes longer than copying a small slice, so it is done once. The
tensors themselves are looked up in every run and not kept, because weights may be freed or moved
between two runs. This file does not know ranks or moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.weights.shard import Key, Piece, Slot

Strides = tuple[int, ...]


@dataclass(frozen=True)
class _StridedView:
    """The position of a slice in a parameter with these strides: the arguments of `as_strided`."""

    parameter_strides: Strides
    shape: tuple[int, ...]
    strides: Strides
    offset: int


KnownViews = dict[tuple[Key, int, int], _StridedView]


class Views:
    """The slots of one rank and one side, for one run, as numbers of one dtype."""

    def __init__(self, slots: Sequence[Slot], known: KnownViews, dtype: torch.dtype) -> None:
        """Look up the slots' parameters; `known` is what earlier runs have computed."""
        self._parameters = {slot.piece.key: _as(dtype, slot.parameter.detach()) for slot in slots}
        self._known = known

    def __call__(self, piece: Piece, start: int, stop: int) -> Tensor:
        """The same view as `Slot.view` of the slot of `piece`."""
        key = piece.key
        parameter = self._parameters[key]
        found = self._known.get((key, start, stop))
        if found is None or found.parameter_strides != parameter.stride():
            view = Slot(piece, parameter).view(start, stop)
            offset = int(view.storage_offset() - parameter.storage_offset())
            found = _StridedView(parameter.stride(), tuple(view.shape), view.stride(), offset)
            self._known[key, start, stop] = found

        return parameter.as_strided(
            found.shape, found.strides, parameter.storage_offset() + found.offset
        )


def _as(dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """The parameter; one with larger numbers gets a last dimension of `dtype` parts."""
    return parameter if parameter.dtype == dtype else parameter.unsqueeze(-1).view(dtype)
