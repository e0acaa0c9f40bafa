"""The converter's view of a checkpoint of any format: a model's tensors, one at a time.

Tensors have their Hugging Face names and full shapes. This file knows no format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.data.tokenizer_files import FILES, adapt_files, copy_files
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
    """A source's description of itself."""

    kind: str  # the format, in words
    step: int | None  # training step of the weights, if it is known
    # One sentence for each kind of thing that is not a weight of the model, so that nothing is
    # dropped in silence.
    left_out: list[str]


class ModelSource:
    """A checkpoint that gives a model's weights, or adapters alone if its spec has adapters."""

    spec: ModelSpec
    tensors: dict[str, TensorForm]  # under the names of the family's `tensor_shapes`
    dtype: torch.dtype  # of a converted model, unless the user wants another
    assets: Path | None = None  # a directory with the tokenizer and the model's other files
    base: ModelSource | None = None  # of adapters alone: their base, whose directory is `assets`
    description: Description

    def read(self, name: str) -> Tensor:
        """One tensor, whole, contiguous and on the host."""
        raise NotImplementedError

    def write_assets(self, directory: Path) -> None:
        """Write the tokenizer and the model's other files without weights into a directory."""
        if self.assets is not None:
            copy_files(self.assets, directory, (*FILES, "generation_config.json"))
            adapt_files(directory)
        elif self.base is not None:
            self.base.write_assets(directory)


def dtype_within(spec: ModelSpec, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor `name` in a model of dtype `dtype`."""
    is_float32 = name.endswith(family_of(spec).float32_endings)
    return torch.float32 if is_float32 else dtype


class TrackedSource(ModelSource):
    """A source in another dtype; `unread` holds the names of the tensors that were not read yet."""

    def __init__(
        self, source: ModelSource, dtype: torch.dtype | None, progress: Callable[[int], None]
    ) -> None:
        """Pass on `source` in `dtype`; `progress` gets the bytes of each tensor first read."""
        self._source = source
        self._progress = progress
        self.spec = source.spec
        self.assets = source.assets
        self.base = source.base
        self.description = source.description
        self.dtype = dtype or source.dtype
        self.unread = set(source.tensors)
        self.tensors = {}
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

    def write_assets(self, directory: Path) -> None:
        """Write them as the source does."""
        self._source.write_assets(directory)
