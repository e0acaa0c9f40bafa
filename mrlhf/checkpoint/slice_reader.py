"""Reads boxes of named tensors out of a checkpoint's files, whoever wrote them.

It knows manifests and boxes. It does not know engines or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.manifest import Manifest, StoredModel, slice_key
from mrlhf.checkpoint.tensor_file import TensorFile
from mrlhf.errors import CheckpointError
from mrlhf.weights.boxes import Box, boxes_in
from mrlhf.weights.shard import Piece, Shape

_ELEMENTS_AT_ONCE = 2 * 2**20


def check_shapes(
    directory: Path, role: str, model: StoredModel, shapes: Mapping[str, Shape]
) -> None:
    """Refuse, with a CheckpointError, a stored model with other tensors than `shapes`."""
    for name in sorted(shapes.keys() | model.tensors.keys()):
        stored = list(model.tensors[name].shape) if name in model.tensors else None
        wanted = list(shapes[name]) if name in shapes else None
        if stored != wanted:
            raise CheckpointError(
                f"{directory} holds another model as {role}: {name} is {stored or 'missing'} there "
                f"and {wanted or 'missing'} in the model of {role}.path, as {role}.freeze and "
                f"{role}.lora have it"
            )


def put_together(
    box: Box, stored: Iterable[tuple[Box, Callable[[Box], Tensor]]], where: str
) -> Tensor:
    """The elements of `box`, out of stored boxes of the same tensor; `where` is for messages.

    Each stored box comes with a function that reads the given part of it. A CheckpointError says
    that they overlap, or do not cover the box.
    """
    result: Tensor | None = None
    filled = 0
    for part, read in stored:
        common = part.intersection(box)
        if common is None:
            continue
        values = read(common)
        if common == box:
            return values
        if result is None:
            result = torch.empty(box.shape, dtype=values.dtype)
        result[common.within(box)] = values
        filled += common.numel

    if result is None or filled != box.numel:
        raise CheckpointError(
            f"{where}: {filled} of the {box.numel} numbers of {box.key} are there; copy the whole "
            "checkpoint"
        )
    return result


class SliceReader:
    """Reads boxes of a checkpoint's tensors.

    Attributes:
        manifest: of the checkpoint.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Open nothing yet."""
        self._directory = directory
        self.manifest = manifest
        self._files: dict[int, TensorFile] = {}

    def read(self, role: str, kind: str, box: Box) -> Tensor:
        """The elements of `box`, with its shape, in the dtype in which they are stored."""
        tensor = self.manifest.models[role].tensors[box.name]
        stored = (
            (part, partial(self._read, number, kind, part))
            for number, part in tensor.boxes(box.name)
        )
        return put_together(box, stored, f"{self._directory}: {role}")

    def _read(self, number: int, kind: str, stored: Box, common: Box) -> Tensor:
        """The part `common` of a stored box, which is in file `number`."""
        if number not in self._files:
            path = self._directory / self.manifest.files[number].path
            self._files[number] = TensorFile(path)
        rows, *columns = common.within(stored)
        values = self._files[number].read_rows(slice_key(kind, stored), rows.start, rows.stop)
        index = (slice(None), *columns)
        return values[index]

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
