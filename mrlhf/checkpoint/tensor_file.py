"""Writes a safetensors file as a stream, hashing it, and reads tensors out of one by plain reads.

The safetensors package wants all tensors of a file in memory, each in one piece. A checkpoint is
made of many runs of large flat tensors, which are written here as they lie. To read, the package
maps a file into memory, so that a process which reads all of a large model seems to need all of it.
This file does not know what the tensors are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from mrlhf.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_LARGEST_HEADER_BYTES = 100 * 10**6  # as in the safetensors package
_CHUNK_BYTES = 4 * 2**20  # read at a time when a file is hashed


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is to be written."""

    key: str  # its name in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Gives flat tensors on any device; one after the other they are the elements.
    runs: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(key: str, tensor: Tensor) -> TensorSource:
        """A whole tensor."""
        return TensorSource(
            key, tensor.dtype, tuple(tensor.shape), lambda: [tensor.detach().contiguous().view(-1)]
        )

    def copied(self, into: Tensor | None = None) -> TensorSource:
        """The same tensor in memory of its own, on the host; `into`, flat, is used if given."""
        copy = into
        if copy is None:
            copy = torch.empty(math.prod(self.shape), dtype=self.dtype, device="cpu")
        is_pinned = copy.is_pinned()  # then the caller waits for the stream of a GPU
        place = 0
        for run in self.runs():
            copy[place : place + run.numel()].copy_(run, non_blocking=is_pinned)
            place += run.numel()
        return TensorSource(self.key, self.dtype, self.shape, lambda: [copy])


@dataclass(frozen=True)
class WrittenFile:
    """A file as a manifest lists it."""

    path: str  # relative to the checkpoint's directory
    nbytes: int
    xxh3: str  # 64-bit XXH3 hash of its bytes, in hex


class TensorFile:
    """A safetensors file whose tensors are read row by row; it is not kept open."""

    def __init__(self, path: Path) -> None:
        """Read the header; CheckpointError if it is missing, damaged or has unknown types."""
        self._path = path
        try:
            self._tensors = dict(_read_header(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: not readable: {reason}; copy it again") from error

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows [start, stop) of a tensor's first dimension."""
        dtype, shape, begin = self._tensors[name]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        size = (stop - start) * row_bytes
        content = np.fromfile(self._path, np.uint8, size, offset=begin + start * row_bytes)
        if len(content) < size:
            raise CheckpointError(f"{self._path}: ends in {name}; copy it again")
        return torch.from_numpy(content).view(dtype).view(stop - start, *shape[1:])


def _read_header(path: Path) -> Iterator[tuple[str, tuple[torch.dtype, list[int], int]]]:
    """The dtype, the shape and the first byte of each tensor of a safetensors file, by name."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _LARGEST_HEADER_BYTES):
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))

    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in _BY_NAME:
            raise ValueError(f"{name} is of type {entry['dtype']}, which is unknown here")
        dtype = _BY_NAME[entry["dtype"]]
        shape = [int(count) for count in entry["shape"]]
        nbytes = math.prod(shape) * dtype.itemsize
        begin, end = map(int, entry["data_offsets"])
        if end - begin != nbytes or begin < 0:
            raise ValueError(f"{name} has {end - begin} bytes and needs {nbytes}")
        if 8 + length + end > size:
            raise ValueError(f"the file ends before {name} does")
        yield name, (dtype, shape, 8 + length + begin)


def write_tensors(
    root: Path, path: str, tensors: Sequence[TensorSource], sync: bool = True
) -> WrittenFile:
    """Write a safetensors file; `sync` waits for the disk, and a CheckpointError names the file."""
    return _write(root, path, chain([_header(tensors)], _contents(tensors)), sync)


def write_bytes(root: Path, path: str, content: bytes, sync: bool = True) -> WrittenFile:
    """Write `content` as a file, as `write_tensors` does."""
    return _write(root, path, [content], sync)


def _write(root: Path, path: str, parts: Iterable[bytes | memoryview], sync: bool) -> WrittenFile:
    digest = xxhash.xxh3_64()
    nbytes = 0
    try:
        with (root / path).open("wb") as stream:
            for part in parts:
                stream.write(part)
                digest.update(part)
                nbytes += len(part)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {root / path}: {error.strerror or error}") from error
    return WrittenFile(path, nbytes, digest.hexdigest())


def _contents(tensors: Sequence[TensorSource]) -> Iterator[memoryview]:
    """The bytes of the tensors, run by run."""
    for tensor in tensors:
        for run in tensor.runs():
            assert run.dtype == tensor.dtype, (tensor, run.dtype)
            yield _bytes_of(run)


def sync_files(root: Path, files: Sequence[WrittenFile]) -> None:
    """Wait until the disk has these files; several take hardly longer than one."""
    for written in files:
        file = root / written.path
        try:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error


def describe_file(root: Path, path: str) -> WrittenFile:
    """The manifest's line of a file that is there; CheckpointError if it cannot be read."""
    digest = xxhash.xxh3_64()
    nbytes = 0
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    try:
        with (root / path).open("rb", buffering=0) as stream:
            while count := stream.readinto(chunk):
                digest.update(chunk[:count])
                nbytes += count
    except OSError as error:
        raise CheckpointError(f"cannot read {root / path}: {error.strerror or error}") from error
    return WrittenFile(path, nbytes, digest.hexdigest())


def _header(tensors: Sequence[TensorSource]) -> bytes:
    """The length and the JSON with which a safetensors file begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        assert tensor.key not in entries, f"{tensor.key} would be in the file twice"
        end = offset + tensor.nbytes
        entries[tensor.key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end

    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a flat contiguous tensor, which is brought to the host if need be."""
    assert flat.dim() == 1 and flat.is_contiguous(), flat.shape
    if flat.numel() == 0:
        return memoryview(b"")
    # `Tensor.numpy` would bind the tensor's memory for ever, and what is offloaded has to leave it.
    return np.from_dlpack(flat.detach().cpu().view(torch.uint8)).data
