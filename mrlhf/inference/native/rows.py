"""The numbers of rows, and arrays that grow with them; it does not know what a row holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class RowNumbers:
    """Hands out row numbers from 0; the number given back first is handed out again first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._used = 0

    def take(self, count: int) -> list[int]:
        """Hand out `count` numbers that are not in use."""
        taken = self._free[:count]
        del self._free[:count]
        new = count - len(taken)
        taken += range(self._used, self._used + new)
        self._used += new
        return taken

    def give_back(self, number: int) -> None:
        """Let `number` be handed out again."""
        self._free.append(number)


def enlarged(array: NDArray[Any], *shape: int) -> NDArray[Any]:
    """Return `array` enlarged to at least `shape`, with zeros in the added part."""
    if all(have >= want for have, want in zip(array.shape, shape, strict=True)):
        return array
    new_shape = [max(have, want) for have, want in zip(array.shape, shape, strict=True)]
    if new_shape[0] > array.shape[0]:  # at least double, so that many small additions stay cheap
        new_shape[0] = max(new_shape[0], 2 * array.shape[0])

    larger = np.zeros(new_shape, dtype=array.dtype)
    larger[tuple(slice(length) for length in array.shape)] = array
    return larger
