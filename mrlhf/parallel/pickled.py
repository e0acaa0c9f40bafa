"""A value taken apart into bytes and its tensors, and put together again in another process.

Objects that both processes have are named by their number. This file knows no ranks.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; a tensor begins at a line of the processor's cache


class Extent(NamedTuple):
    """The place of a tensor in a flat memory, in bytes."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: Tensor) -> Tensor:
        """The tensor, in `memory`, uint8 [bytes]; it has a storage of its own, as `save` wants."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.begin)
        return flat.view(self.shape)


def extents_of(tensors: Sequence[Tensor]) -> list[Extent]:
    """The extents of tensors on the host that lie one after the other."""
    extents: list[Extent] = []
    end = 0
    for tensor in tensors:
        assert tensor.device.type == "cpu", f"a tensor on {tensor.device}"
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + tensor.nbytes
        extents.append(Extent(begin, end, tuple(tensor.shape), tensor.dtype))
    return extents


def take_apart(value: object, known: Sequence[object]) -> tuple[bytes, list[Tensor]]:
    """The value, pickled, and its tensors; `known` are objects that the reader has too."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, known)
    pickler.dump(value)
    return buffer.getvalue(), pickler.apart[len(known) :]


def put_together(pickled: bytes, known: Sequence[object], tensors: Sequence[Tensor]) -> Any:
    """The value that `take_apart` took apart."""
    return _Unpickler(io.BytesIO(pickled), [*known, *tensors]).load()


class _Pickler(pickle.Pickler):
    """Writes a number in the place of each object that the reader has, and of each tensor."""

    def __init__(self, buffer: io.BytesIO, known: Sequence[object]) -> None:
        super().__init__(buffer)
        self.apart: list[Any] = list(known)
        self._numbers = {
            id(thing): number for number, thing in enumerate(known) if thing is not None
        }

    def persistent_id(self, thing: Any) -> int | None:
        """The number of the object in `apart`; None for an object that is pickled."""
        if isinstance(thing, Tensor) and id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self.apart)
            self.apart.append(thing)
        return self._numbers.get(id(thing))


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(self, buffer: io.BytesIO, apart: Sequence[object]) -> None:
        super().__init__(buffer)
        self._apart = apart

    def persistent_load(self, number: int) -> object:
        """The object with this number."""
        return self._apart[number]
