"""Reads and writes the `torch_dist` format: torch.distributed.checkpoint as megatron-core uses it.

A checkpoint is a directory. `.metadata` gives the place of each tensor's boxes in the `.distcp`
files; `metadata.json` names the format; `common.pt`, or from megatron-core 0.19 an object in the
`.distcp` files, holds the rest. Boxes are read and written one
at a time, in one process and without process groups. Only the classes in `_ALLOWED` are made when
reading. What is written is for megatron-core's `dist_checkpointing.load`. This file knows neither
models nor the names of their tensors.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.utils import _create_file_view

from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.checkpoint.conversion.restricted_pickle import Name, read_pickle
from mrlhf.checkpoint.slice_reader import put_together
from mrlhf.errors import CheckpointError
from mrlhf.weights.boxes import Box, whole
from mrlhf.weights.files import flush
from mrlhf.weights.shard import Shape

FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
INDEX_FILE = ".metadata"
FORMAT = "torch_dist"

# Every dtype of torch, under the name that a pickle has for it.
DTYPES: dict[Name, torch.dtype] = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

# A checkpoint names more classes, but nothing here needs what they say.
_ALLOWED: dict[Name, Any] = {
    **DTYPES,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("collections", "OrderedDict"): OrderedDict,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            "_MEM_FORMAT_ENCODING",
        )
    },
}


class _FileRange(NamedTuple):
    """A place in a file, bytes."""

    file: Path
    offset: int
    length: int


class TorchDistReader:
    """The tensors of a `torch_dist` checkpoint."""

    def __init__(self, directory: Path) -> None:
        """Read the index of the checkpoint in `directory`; CheckpointError if it is damaged."""
        check_format(directory)
        self._directory = directory
        index, _ = read_pickle(directory / INDEX_FILE, _ALLOWED)
        if not isinstance(index, metadata.Metadata):
            raise CheckpointError(f"{directory / INDEX_FILE}: not an index of a checkpoint")

        self.tensors: dict[str, TensorForm] = {}  # under the checkpoint's own names
        self.objects: list[str] = []  # the names of other objects, which are never read
        self._boxes: dict[str, list[Box]] = {}
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, metadata.TensorStorageMetadata):
                self.tensors[name] = TensorForm(tuple(entry.size), entry.properties.dtype)
                self._boxes[name] = [_box(name, chunk) for chunk in entry.chunks]
            elif name != COMMON_OBJECT:
                self.objects.append(name)

        self._places: dict[tuple[str, Shape | None], _FileRange] = {}
        for key, info in index.storage_data.items():
            offsets = None if key.offset is None else tuple(key.offset)
            self._places[key.fqn, offsets] = self._place(info)

    def read(self, box: Box) -> Tensor:
        """A box of a tensor; CheckpointError if a file or a part of it is missing or damaged."""
        stored = ((part, partial(self._read, part)) for part in self._boxes[box.name])
        return put_together(box, stored, str(self._directory))

    def read_common(self, allowed: Mapping[Name, Any]) -> tuple[Any, set[str]]:
        """What `read_pickle` makes of the content of `common.pt`, wherever it is."""
        place = self._places.get((COMMON_OBJECT, None))
        if place is None:
            return read_pickle(self._directory / COMMON_FILE, allowed)
        content, refused = read_pickle(place.file, allowed, place.offset, place.length)
        return content[0] if isinstance(content, list) and content else content, refused

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

    def _place(self, info: Any) -> _FileRange:
        name = info.relative_path
        # A file name must stay in the directory.
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(
                f"{self._directory / INDEX_FILE}: names the file {name!r}, which is not beside it; "
                f"do not use this checkpoint"
            )
        return _FileRange(self._directory / name, int(info.offset), int(info.length))

    def _read(self, box: Box, common: Box) -> Tensor:
        """The part `common` of a stored box."""
        place = self._places.get((box.name, box.starts))
        if place is None:
            raise CheckpointError(f"{self._directory}: no file is said to hold {box.key}")
        try:
            with place.file.open("rb") as file:
                part = _create_file_view(file, place.offset, place.length)
                values = torch.load(cast(BinaryIO, part), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file may raise anything
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{place.file}: {box.key} is not readable at byte {place.offset}: {reason}"
            ) from error

        form = TensorForm(box.shape, self.tensors[box.name].dtype)
        if not isinstance(values, Tensor) or TensorForm(tuple(values.shape), values.dtype) != form:
            raise CheckpointError(
                f"{place.file}: what lies at byte {place.offset} is not {box.key}"
            )
        return values.detach()[common.within(box)]


def _box(name: str, chunk: Any) -> Box:
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return Box(name, tuple(chunk.offsets), tuple(start + size for start, size in ends))


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


class TorchDistWriter:
    """Writes a `torch_dist` checkpoint box by box, and keeps none in memory."""

    def __init__(self, directory: Path, max_file_bytes: int) -> None:
        """Write to the empty `directory`, in files that end once they have `max_file_bytes`."""
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._entries: dict[str, Any] = {}
        self._places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
        self._file_count = 0  # of those that are full

    def write_box(self, name: str, full_shape: Shape, offsets: Shape, values: Tensor) -> None:
        """Write the box of tensor `name` that begins at `offsets`; `values` has its shape."""
        # torch.save would write the whole storage of a view.
        values = values.detach().contiguous()
        if values.untyped_storage().nbytes() != values.nbytes:
            values = values.clone()

        if name not in self._entries:
            self._entries[name] = metadata.TensorStorageMetadata(
                metadata.TensorProperties.create_from_tensor(values), torch.Size(full_shape), []
            )
        box = metadata.ChunkStorageMetadata(torch.Size(offsets), values.shape)
        self._entries[name].chunks.append(box)
        self._store(metadata.MetadataIndex(name, offsets), values)

    def write_object(self, name: str, value: Any) -> None:
        """Write an object that is no tensor, in a list of one, as megatron-core does."""
        self._entries[name] = metadata.BytesStorageMetadata()
        self._store(metadata.MetadataIndex(name), [value])

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write the index and `common`, of plain types; `metadata.json` comes last."""
        for file in self._directory.glob("*.distcp"):
            flush(file)
        torch.save(dict(common), self._directory / COMMON_FILE)
        index = metadata.Metadata(
            state_dict_metadata=self._entries,
            storage_data=self._places,
            storage_meta=metadata.StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )
        (self._directory / INDEX_FILE).write_bytes(pickle.dumps(index))

        content = {
            "sharded_backend": FORMAT,
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (self._directory / FORMAT_FILE).write_text(json.dumps(content), encoding="utf-8")

    def _store(self, index: metadata.MetadataIndex, value: Any) -> None:
        path = self._directory / f"__0_{self._file_count}.distcp"
        with path.open("ab") as file:
            offset = file.tell()
            try:
                torch.save(value, file)
            except RuntimeError as error:
                # torch closes its archive after an error of the file system, and fails once more.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            end = file.tell()

        self._places[index] = filesystem._StorageInfo(path.name, offset, end - offset)
        if end >= self._max_file_bytes:
            self._file_count += 1
