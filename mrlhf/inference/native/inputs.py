"""The inputs of a pass, as arrays of the host and as tensors where the pass runs.

One copy brings all of them to a GPU. This file knows no model and no schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.inference.native.operators import StepInputs
from mrlhf.parallel.masks import Paged


class PassArrays(NamedTuple):
    """The inputs of one pass; `StepInputs` and `Paged` say what is not explained here."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    cache_places: NDArray[np.int64]
    last: NDArray[np.int64]
    sources: NDArray[np.int64]  # the place in `last` after which each token is drawn, [draws]
    uniform: NDArray[np.float64]  # the number that picks each of these tokens, [draws]
    query_edges: NDArray[np.int32]
    lengths: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slots: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


Pass = tuple[StepInputs, Tensor, Tensor]
"""The same as tensors: the model's inputs, `sources` and `uniform`."""


def on_device(arrays: PassArrays, device: torch.device) -> Pass:
    """Bring the inputs to the device; nothing waits."""
    if device.type == "cpu":
        parts = [torch.from_numpy(array) for array in arrays]
    else:
        parts = unpacked(packed(arrays).to(device, non_blocking=True), arrays)
    counts = np.diff(arrays.query_edges)
    return as_pass(parts, int(counts.max()), int(arrays.lengths.max()), tuple(counts.tolist()))


def packed(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Lay the arrays end to end in pinned memory, each from the start of a word, int64 [words]."""
    words = torch.empty(sum(map(_words, arrays)), dtype=torch.int64, pin_memory=True)
    for array, view in zip(arrays, unpacked(words, arrays), strict=True):
        view.numpy()[...] = array
    return words


def unpacked(words: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return the views of `words` that stand for the arrays."""
    views = []
    parts = words.split([_words(array) for array in arrays])
    for array, part in zip(arrays, parts, strict=True):
        numbers = part.view(getattr(torch, array.dtype.name))
        views.append(numbers[: array.size].view(array.shape))
    return views


def _words(array: NDArray[Any]) -> int:
    return -(-array.nbytes // 8)


def as_pass(
    parts: Sequence[Tensor], most_queries: int, most_keys: int, counts: tuple[int, ...] = ()
) -> Pass:
    """Return the inputs from tensors in the order of `PassArrays`, with the sizes of `Paged`."""
    tokens, positions, cache_places, last, sources, uniform, edges, lengths, tables, slots = parts
    mask = Paged(edges, lengths, tables, most_queries, most_keys)
    inputs = StepInputs(tokens, positions, cache_places, mask, last, slots, counts)
    return inputs, sources, uniform
