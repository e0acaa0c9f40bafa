"""A value taken apart into bytes and its tensors, and put together again in another process.

Objects that both processes have are named by their number. This file knows no ranks.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; a tensor begins at a line of the processor's cache


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a flat memory; `begin` is in bytes."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: Tensor) -> Tensor:
        """The tensor, in `memory`, uint8 [bytes]; it has a storage of its own, as `save` wants."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.begin)
        return flat.view(self.shape)


@dataclass(frozen=True)
class Pickled:
    """A value without its tensors."""

    text: bytes  # the value, pickled
    places: list[Place]  # where each tensor lies
    nbytes: int  # of the memory that holds them


def pickle_value(value: object, known: Sequence[object]) -> tuple[Pickled, list[Tensor]]:
    """Take `value` apart; `known` are objects that the reader has too.

    Returns:
        The value without its tensors, and each tensor, once for each place.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, known)
    pickler.dump(value)
    return Pickled(buffer.getvalue(), pickler.places, pickler.nbytes), pickler.tensors


def unpickle_value(pickled: Pickled, memory: Tensor, known: Sequence[object]) -> Any:
    """The value, whose tensors lie in `memory`, uint8 [pickled.nbytes]."""
    tensors = [place.within(memory) for place in pickled.places]
    return _Unpickler(io.BytesIO(pickled.text), tensors, known).load()


class _Pickler(pickle.Pickler):
    """Puts tensors aside, and names objects that the reader has."""

    def __init__(self, buffer: io.BytesIO, known: Sequence[object]) -> None:
        super().__init__(buffer)
        self.tensors: list[Tensor] = []
        self.places: list[Place] = []
        self.nbytes = 0
        self._known = {id(thing): number for number, thing in enumerate(known) if thing is not None}
        self._numbers: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> tuple[str, int] | None:
        """The name of a known object or a tensor; None for everything else."""
        if id(thing) in self._known:
            return "known", self._known[id(thing)]
        if not isinstance(thing, Tensor):
            return None

        if id(thing) not in self._numbers:
            assert thing.device.type == "cpu", f"a tensor on {thing.device}"
            begin = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._numbers[id(thing)] = len(self.tensors)
            self.tensors.append(thing)
            self.places.append(Place(begin, tuple(thing.shape), thing.dtype))
            self.nbytes = begin + thing.numel() * thing.itemsize
        return "tensor", self._numbers[id(thing)]


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(
        self, buffer: io.BytesIO, tensors: Sequence[Tensor], known: Sequence[object]
    ) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._known = known

    def persistent_load(self, name: tuple[str, int]) -> object:
        """The object that `persistent_id` named."""
        kind, number = name
        return self._known[number] if kind == "known" else self._tensors[number]
