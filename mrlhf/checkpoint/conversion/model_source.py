"""The converter's view of a checkpoint of any format: a model's tensors, one at a time.

Tensors have their Hugging Face names and full shapes. This file knows no format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mrlhf.models.families import family_of
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Shape


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype of a tensor, without its numbers."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Description:
    """A source's description of itself.

    Attributes:
        kind: the format, in words.
        step: training step of the weights, if it is known.
        left_out: one sentence for each kind of thing in the source that is not a weight of the
            model, so that nothing is dropped in silence.
    """

    kind: str
    step: int | None
    left_out: list[str]


class ModelSource(Protocol):
    """A checkpoint that gives a model's weights."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    @property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Every tensor of the model; its names are those of the family's `tensor_shapes`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a converted model, unless the user wants another."""

    @property
    def assets(self) -> Path | None:
        """A directory with the tokenizer and the model's other files, if there is one."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, whole, contiguous and on the host."""

    def describe(self) -> Description:
        """Describe the checkpoint, and the parts of it that are not converted."""

    def close(self) -> None:
        """Close its files."""


def dtype_within(spec: ModelSpec, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor `name` in a model of dtype `dtype`."""
    is_float32 = name.endswith(family_of(spec).float32_endings)
    return torch.float32 if is_float32 else dtype


class TrackedSource:
    """A source in another dtype; `unread` holds the names of the tensors that were not read yet."""

    def __init__(
        self, source: ModelSource, dtype: torch.dtype | None, progress: Callable[[int], None]
    ) -> None:
        """Pass on `source` in `dtype` (None: each tensor's own).

        `progress` is called with the bytes of each tensor when it is first read.
        """
        self._source = source
        self._progress = progress
        self.spec = source.spec
        self.assets = source.assets
        self.dtype = dtype or source.dtype
        self.unread = set(source.tensors)
        self.tensors: dict[str, TensorForm] = {}
        for name, form in source.tensors.items():
            wanted = form.dtype if dtype is None else dtype_within(self.spec, name, dtype)
            self.tensors[name] = TensorForm(form.shape, wanted)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor = self._source.read(name).to(self.tensors[name].dtype)
        if name in self.unread:
            self.unread.remove(name)
            self._progress(self.tensors[name].nbytes)
        return tensor

    def describe(self) -> Description:
        """The description of the source."""
        return self._source.describe()

    def close(self) -> None:
        """Close the files of the source."""
        self._source.close()


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same bits: a NaN equals itself, and 0 is not -0."""
    views = [tensor.contiguous().view(torch.uint8) for tensor in (first, second)]
    return torch.equal(views[0], views[1])
