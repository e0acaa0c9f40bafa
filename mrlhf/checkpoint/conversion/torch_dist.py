"""Reads the `torch_dist` format: torch.distributed.checkpoint as megatron-core uses it.

A checkpoint is a directory. `.metadata` gives the place of each tensor's boxes in the `.distcp`
files; `metadata.json` names the format; `common.pt` holds the rest. Boxes are read one at a time,
in one process and without process groups, and only the classes in `_ALLOWED` are made. This file
knows neither models nor the names of their tensors.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner

from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.checkpoint.conversion.restricted_pickle import Name, Placeholder, read_pickle
from mrlhf.errors import CheckpointError
from mrlhf.weights.boxes import Box, whole
from mrlhf.weights.shard import Shape

FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
INDEX_FILE = ".metadata"
FORMAT = "torch_dist"


def _dtype_names() -> dict[Name, torch.dtype]:
    found = {}
    for name in dir(torch):
        value = getattr(torch, name)
        if isinstance(value, torch.dtype):
            found["torch", name] = value
    return found


DTYPES = _dtype_names()
"""Every dtype of torch, under the name that a pickle has for it."""

_ALLOWED: dict[Name, Any] = {
    **DTYPES,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (metadata.__name__, kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    # These are in a checkpoint, but nothing here needs what they say.
    **{
        (planner.__name__, name): Placeholder
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    },
    **{
        ("megatron.core.dist_checkpointing.strategies.torch", name): Placeholder
        for name in ("MCoreMetadata", "MCoreSavePlan")
    },
    **{
        (module, name): Placeholder
        for module in (pathlib.__name__, "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
}


class _Place(NamedTuple):
    """A place in a file, bytes."""

    file: Path
    offset: int
    length: int


class TorchDistReader:
    """The tensors of a `torch_dist` checkpoint.

    Attributes:
        tensors: every tensor, under the checkpoint's own names.
        objects: the names of everything else; these are never read.
    """

    def __init__(self, directory: Path) -> None:
        """Read the index of the checkpoint in `directory`, and no tensor.

        Raises:
            CheckpointError: there is no such checkpoint, or its index is damaged.
        """
        check_format(directory)
        self._directory = directory
        index = read_pickle(directory / INDEX_FILE, _ALLOWED)
        if not isinstance(index, metadata.Metadata):
            raise CheckpointError(f"{directory / INDEX_FILE}: not an index of a checkpoint")

        self.tensors: dict[str, TensorForm] = {}
        self.objects: list[str] = []
        self._boxes: dict[str, list[Box]] = {}
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, metadata.TensorStorageMetadata):
                self.tensors[name] = TensorForm(tuple(entry.size), entry.properties.dtype)
                self._boxes[name] = [_box(name, chunk) for chunk in entry.chunks]
            else:
                self.objects.append(name)

        self._places: dict[tuple[str, Shape | None], _Place] = {}
        for key, info in index.storage_data.items():
            offsets = None if key.offset is None else tuple(key.offset)
            self._places[key.fqn, offsets] = self._place(info)
        self._files: dict[Path, BinaryIO] = {}

    def read(self, box: Box) -> Tensor:
        """Read a box of a tensor, which has the checkpoint's own name.

        Raises:
            CheckpointError: a file is missing or damaged, or the files do not cover the box.
        """
        dtype = self.tensors[box.name].dtype
        result: Tensor | None = None
        filled = 0
        for stored in self._boxes[box.name]:
            common = stored.intersection(box)
            if common is None:
                continue
            values = self._read_stored(stored, dtype)[common.within(stored)]
            if common == box:
                return values
            if result is None:
                result = torch.empty(box.shape, dtype=dtype)
            result[common.within(box)] = values
            filled += common.numel

        if result is None or filled != box.numel:
            raise CheckpointError(
                f"{self._directory}: {filled} of the {box.numel} numbers of {box.key} are there; "
                f"copy the whole checkpoint"
            )
        return result

    def problems(self) -> Iterator[str]:
        """Check the files without reading a tensor; one sentence for each problem."""
        needed: dict[Path, int] = {}
        for place in self._places.values():
            needed[place.file] = max(needed.get(place.file, 0), place.offset + place.length)

        for file, size in sorted(needed.items()):
            if not file.is_file():
                yield f"{file.name} is missing"
            elif file.stat().st_size < size:
                yield f"{file.name} has {file.stat().st_size} bytes and must have {size}"
        for name, stored in self.tensors.items():
            numel = sum(box.numel for box in self._boxes[name])
            if numel != whole(name, stored.shape).numel:
                yield f"{name} is not whole: {numel} of its numbers are stored"

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _place(self, info: Any) -> _Place:
        """The place of an entry."""
        name = info.relative_path
        # A file name must stay in the directory.
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(
                f"{self._directory / INDEX_FILE}: names the file {name!r}, which is not beside it; "
                f"do not use this checkpoint"
            )
        return _Place(self._directory / name, int(info.offset), int(info.length))

    def _read_stored(self, box: Box, dtype: torch.dtype) -> Tensor:
        place = self._places.get((box.name, box.starts))
        if place is None:
            raise CheckpointError(f"{self._directory}: no file is said to hold {box.key}")
        try:
            if place.file not in self._files:
                self._files[place.file] = place.file.open("rb")
            window = _Window(self._files[place.file], place.offset, place.length)
            values = torch.load(cast(BinaryIO, window), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file may raise anything
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{place.file}: {box.key} is not readable at byte {place.offset}: {reason}"
            ) from error

        if not isinstance(values, Tensor) or (tuple(values.shape), values.dtype) != (
            box.shape,
            dtype,
        ):
            raise CheckpointError(
                f"{place.file}: what lies at byte {place.offset} is not {box.key}"
            )
        return values.detach()


def _box(name: str, chunk: Any) -> Box:
    starts = tuple(chunk.offsets)
    stops = tuple(start + size for start, size in zip(starts, chunk.sizes, strict=True))
    return Box(name, starts, stops)


def check_format(directory: Path) -> None:
    """Refuse a directory without a `torch_dist` checkpoint, with a CheckpointError."""
    file = directory / FORMAT_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{directory}: no {FORMAT_FILE} there; give a Megatron-LM checkpoint that was saved "
            f"with --ckpt-format {FORMAT}"
        )
    try:
        backend = json.loads(file.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: does not name a format: {error}") from error
    if backend != FORMAT:
        raise CheckpointError(
            f"{directory}: its format is {backend}; save it anew with --ckpt-format {FORMAT}"
        )


class _Window(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = min(max(0, start + offset), self._length)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._length - self._position)
        self._file.seek(self._offset + self._position)
        count: int = self._file.readinto(memoryview(buffer)[:size])  # type: ignore[attr-defined]
        self._position += count
        return count
