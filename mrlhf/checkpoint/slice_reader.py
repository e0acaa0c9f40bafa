"""Reads boxes of named tensors out of a checkpoint's files, whoever wrote them.

It knows manifests and boxes. It does not know engines or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mrlhf.checkpoint.manifest import Manifest, StoredModel, StoredTensor, slice_key
from mrlhf.errors import CheckpointError
from mrlhf.weights.boxes import Box, boxes_in
from mrlhf.weights.shard import Piece, Shape


def check_shapes(
    directory: Path, role: str, model: StoredModel, shapes: Mapping[str, Shape]
) -> None:
    """Refuse a stored model whose tensors are not exactly those of `shapes`.

    Raises:
        CheckpointError: naming the first tensor that is missing, too many or of another shape.
    """
    for name in sorted(shapes.keys() | model.tensors.keys()):
        stored = list(model.tensors[name].shape) if name in model.tensors else None
        wanted = list(shapes[name]) if name in shapes else None
        if stored != wanted:
            raise CheckpointError(
                f"{directory} holds another model as {role}: {name} is {stored or 'missing'} there "
                f"and {wanted or 'missing'} in the model of {role}.path"
            )


class SliceReader:
    """Reads boxes of a checkpoint's tensors; a context manager that closes the files."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        open_file: Callable[[Path], Any] | None = None,
    ) -> None:
        """Open nothing yet; `open_file` stands for the safetensors package's `safe_open`."""
        self._open_file = open_file or partial(safe_open, framework="pt")
        self._directory = directory
        self._manifest = manifest
        self._files: dict[int, Any] = {}

    def read(self, role: str, kind: str, box: Box) -> Tensor:
        """The elements of `box`, with its shape, in the dtype in which they are stored.

        Raises:
            CheckpointError: the slices in the files are not those of the manifest.
        """
        tensor: StoredTensor = self._manifest.models[role].tensors[box.name]
        result: Tensor | None = None
        filled = 0
        for number, stored in tensor.boxes(box.name):
            common = stored.intersection(box)
            if common is None:
                continue
            values = self._file(number).get_slice(slice_key(kind, stored))[common.within(stored)]
            if common == box:
                return values
            if result is None:
                result = torch.empty(box.shape, dtype=values.dtype)
            result[common.within(box)] = values
            filled += common.numel

        if result is None or filled != box.numel:
            raise CheckpointError(
                f"{self._directory}: the slices of {role} {box.name} overlap or leave gaps"
            )
        return result

    def fill(
        self,
        role: str,
        kind: str,
        pieces: Sequence[Piece],
        parameter_shape: Shape,
        target: Tensor,
        start: int,
    ) -> None:
        """Fill `target`, elements of a flat parameter from `start` on, as far as pieces lie in it.

        Padding, which belongs to no piece, becomes zero.
        """
        target.zero_()
        for piece in pieces:
            for stored in boxes_in(piece, parameter_shape, start, start + target.numel()):
                values = self.read(role, kind, stored.box).reshape(-1)
                place = 0
                for begin, end in stored.runs:
                    length = end - begin
                    target[begin - start : end - start].copy_(values[place : place + length])
                    place += length

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)

    def _file(self, number: int) -> Any:
        if number not in self._files:
            path = self._directory / self._manifest.files[number].path
            self._files[number] = self._open_file(path).__enter__()
        return self._files[number]
