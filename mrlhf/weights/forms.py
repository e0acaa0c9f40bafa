"""Tensors of files that hold several of a model's: how these lie in them.

This file does not know files, models or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.weights import mxfp4
from mrlhf.weights.shard import Shape


@dataclass(frozen=True)
class MatrixRows:
    """Rows [start, stop) of matrix `number` in a stack of matrices."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a matrix."""

    start: int
    stop: int


@dataclass(frozen=True)
class Columns:
    """Every `step`-th column of a matrix, from `first` on."""

    first: int
    step: int


Part = MatrixRows | Rows | Columns


@dataclass(frozen=True)
class OtherForm:
    """A tensor of a file that holds one or several tensors of a model."""

    shape: Shape
    # The part of it that each of the model's tensors is, by name; None: all of it.
    parts: Mapping[str, Part | None]
    is_transposed: bool = False  # whether the columns of a matrix in the stack are the model's rows
    is_packed: bool = False  # whether it has bytes of numbers in MXFP4

    def shape_of(self, part: Part | None) -> Shape:
        """The shape of the model's tensor that is this part."""
        if part is None:
            return self.shape
        if isinstance(part, Columns):
            return (self.shape[0], self.shape[1] // part.step)
        rows = part.stop - part.start
        if self.is_transposed:
            return (rows, self.shape[1])
        if self.is_packed:
            return (rows, self.shape[2] * mxfp4.BLOCK)
        return (rows, *self.shape[1 if isinstance(part, Rows) else 2 :])

    def joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor of a file whose parts are these whole tensors of the model, by name."""
        are_columns = isinstance(next(iter(self.parts.values())), Columns)
        stack = torch.stack([tensors[name] for name in self.parts], dim=-1 if are_columns else 0)
        if self.is_transposed:
            stack = stack.transpose(1, 2)
        return stack.reshape(self.shape)
