"""Quantised matrices of safetensors files, whose numbers are multiplied out as they are read.

Each class reads what an index of slices asks for, as safetensors' slices do. This file does not
know the names of tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrlhf.weights import mxfp4
from mrlhf.weights.shard import Shape

FP8_BLOCK = 128
"""Rows and columns of a block of a matrix of fp8 numbers, whose scale multiplies them."""
INT4_GROUP = 32
"""Neighbours in a row of integers of 4 bits that share a scale."""
INT4_PACKED = 8
"""How many of them an int32 holds, the first in its lowest bits, each plus 8."""


class MxFp4Rows:
    """Some rows of a matrix in MXFP4, of which whole rows are read."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks = blocks
        self._scales = scales

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        whole = mxfp4.dequantised(self._blocks[rows], self._scales[rows])
        return whole[:, columns[0]] if columns else whole


class Fp8Blocks:
    """A matrix of fp8 numbers in blocks; what is read of it is float32, times its scales."""

    def __init__(self, matrix: Any, shape: Shape, scales: Tensor) -> None:
        self._matrix = matrix
        self._shape = shape
        self._scales = scales.float()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, columns = (*(index if isinstance(index, tuple) else (index,)), slice(None))[:2]
        row_blocks, column_blocks = (
            torch.arange(size)[part] // FP8_BLOCK
            for size, part in zip(self._shape, (rows, columns), strict=True)
        )
        read: Tensor = self._matrix[rows, columns]
        return read.float() * self._scales[row_blocks][:, column_blocks]


class Int4Rows:
    """A matrix of packed integers of 4 bits; whole rows are read, as float32, times their scales.

    The form is `pack-quantized` of the package compressed-tensors.
    """

    def __init__(self, packed: Any, scales: Any) -> None:
        self._packed = packed
        self._scales = scales

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        packed: Tensor = self._packed[rows]
        shifts = torch.arange(0, 4 * INT4_PACKED, 4, dtype=torch.int32)
        numbers = ((packed[..., None] >> shifts) & 15) - 8
        scales = self._scales[rows].float()
        whole = (numbers.view(*scales.shape, INT4_GROUP) * scales[..., None]).flatten(1)
        return whole[:, columns[0]] if columns else whole
