"""Reads boxes of named tensors out of a checkpoint's files, whoever wrote them.

It knows manifests and boxes. It does not know engines or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.manifest import Manifest, StoredModel, StoredTensor, slice_key
from mrlhf.checkpoint.streamed_file import StreamedFile
from mrlhf.errors import CheckpointError
from mrlhf.weights.boxes import Box, boxes_in
from mrlhf.weights.shard import Piece, Shape

_ELEMENTS_AT_ONCE = 2 * 2**20


def check_shapes(
    directory: Path, role: str, model: StoredModel, shapes: Mapping[str, Shape]
) -> None:
    """Refuse a stored model whose tensors are not exactly those of `shapes`.

    Raises:
        CheckpointError: with the first tensor that is missing, too many or of another shape.
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

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Open nothing yet."""
        self._directory = directory
        self._manifest = manifest
        self._files: dict[int, StreamedFile] = {}

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
        """Fill `target`, elements of a flat parameter from `start` on, with the elements of its
        pieces.

        Padding, which belongs to no piece, becomes zero.
        """
        target.zero_()
        columns = math.prod(parameter_shape[1:])
        step = max(1, _ELEMENTS_AT_ONCE // columns) * columns
        stop = start + target.numel()
        begin = start
        while begin < stop:
            end = min(stop, begin - begin % columns + step)
            part = target[begin - start : end - start]
            for piece in pieces:
                self._fill_part(role, kind, piece, parameter_shape, part, begin)
            begin = end

    def _fill_part(
        self, role: str, kind: str, piece: Piece, parameter_shape: Shape, part: Tensor, start: int
    ) -> None:
        """Fill those elements of one piece that lie in `part`, which begins at `start`."""
        for stored in boxes_in(piece, parameter_shape, start, start + part.numel()):
            values = self.read(role, kind, stored.box).reshape(-1)
            place = 0
            for begin, end in stored.runs:
                length = end - begin
                part[begin - start : end - start].copy_(values[place : place + length])
                place += length

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, number: int) -> StreamedFile:
        if number not in self._files:
            path = self._directory / self._manifest.files[number].path
            self._files[number] = StreamedFile(path)
        return self._files[number]
