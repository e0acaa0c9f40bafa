"""Writes a safetensors file as a stream, and hashes it while it is written.

The safetensors package wants all tensors of a file in memory, each in one piece. A checkpoint is
made of many runs of large flat tensors, which are written here as they lie. Reading is left to the
package. This file does not know what the tensors are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
_CHUNK_BYTES = 4 * 2**20  # read at a time when a file is hashed


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is to be written.

    Attributes:
        key: its name in the file.
        dtype: of its elements.
        shape: its shape.
        runs: gives flat tensors on any device; one after the other they are the elements.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
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
        place = 0
        for run in self.runs():
            copy[place : place + run.numel()].copy_(run)
            place += run.numel()
        return TensorSource(self.key, self.dtype, self.shape, lambda: [copy])


@dataclass(frozen=True)
class WrittenFile:
    """A file as a manifest lists it.

    Attributes:
        path: relative to the checkpoint's directory.
        nbytes: its size.
        xxh3: 64-bit XXH3 hash of its bytes, in hex.
    """

    path: str
    nbytes: int
    xxh3: str


def write_tensors(
    root: Path, path: str, tensors: Sequence[TensorSource], sync: bool = True
) -> WrittenFile:
    """Write `tensors` as the safetensors file `root/path`; `sync` waits until the disk has it.

    Raises:
        CheckpointError: the file system refuses; the message names the file.
    """
    header = _header(tensors)
    digest = xxhash.xxh3_64(header)
    file = root / path
    nbytes = len(header)

    try:
        with file.open("wb") as stream:
            stream.write(header)
            for tensor in tensors:
                for run in tensor.runs():
                    assert run.dtype == tensor.dtype, (tensor, run.dtype)
                    data = _bytes_of(run)
                    stream.write(data)
                    digest.update(data)
                    nbytes += len(data)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error

    return WrittenFile(path, nbytes, digest.hexdigest())


def write_bytes(root: Path, path: str, content: bytes, sync: bool = True) -> WrittenFile:
    """Write `content` as the file `root/path`; `sync` waits until the disk has it.

    Raises:
        CheckpointError: the file system refuses.
    """
    file = root / path
    try:
        with file.open("wb") as stream:
            stream.write(content)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error
    return WrittenFile(path, len(content), xxhash.xxh3_64_hexdigest(content))


def sync_files(root: Path, files: Sequence[WrittenFile]) -> None:
    """Wait until the disk has these files; several take hardly longer than one.

    Raises:
        CheckpointError: the file system refuses; the message names the file.
    """
    for written in files:
        file = root / written.path
        try:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error


def describe_file(root: Path, path: str) -> WrittenFile:
    """The manifest's line of a file that is there already.

    Raises:
        CheckpointError: it cannot be read.
    """
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
    return flat.detach().cpu().view(torch.uint8).numpy().data
