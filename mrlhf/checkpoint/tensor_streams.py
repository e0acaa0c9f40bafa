"""What the converter asks of a checkpoint format: tensors that come and go one at a time.

Tensors have their Hugging Face names and full shapes, whatever the format. This file knows no
format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Shape


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its full shape and dtype."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Description:
    """What a source says of itself.

    Attributes:
        kind: the format, in words.
        step: training step of the weights, if it is known.
        left_out: one sentence for each kind of thing that the source holds and that is not a weight
            of the model, so that nothing goes in silence.
    """

    kind: str
    step: int | None
    left_out: list[str]


class TensorSource(Protocol):
    """A checkpoint that gives a model's weights."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the model, by name; exactly those of its family's `tensor_shapes`."""

    @property
    def assets(self) -> Path | None:
        """A directory with the tokenizer and whatever else belongs to the model, if there is."""

    def read(self, name: str) -> Tensor:
        """One tensor, whole and on the host."""

    def describe(self) -> Description:
        """What it is, and what of it is not converted."""

    def close(self) -> None:
        """Close its files."""


class TensorSink(Protocol):
    """A checkpoint that is being written."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, whole and on the host; each name comes once."""

    def finish(self) -> list[str]:
        """Write what comes last; returns sentences that the user should read.

        Raises:
            CheckpointError: a tensor of the model has not come.
        """
