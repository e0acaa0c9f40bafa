"""Reads tensors out of a safetensors file with plain reads.

The safetensors package maps a file into memory, so that a process which reads all of a large model
seems to need all of it. Here only the tensor that is asked for is in memory. This file does not
know what the tensors are.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.checkpoint.tensor_file import DTYPES
from mrlhf.errors import WeightError

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_LARGEST_HEADER_BYTES = 100 * 10**6  # as in the safetensors package


class StreamedFile:
    """An open safetensors file, with its `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Open a file and read its header.

        Raises:
            WeightError: it is missing, damaged, or has tensors of a type that we do not know.
        """
        self._path = path
        self._begins: dict[str, int] = {}
        self.tensors: dict[str, TensorForm] = {}
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise WeightError(f"{path}: {error.strerror or error}") from error
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._file.close()
            reason = " ".join(str(error).split())
            raise WeightError(f"{path}: not readable: {reason}; copy it again") from error

    def get_slice(self, name: str) -> _Slice:
        """A tensor that is read when it is indexed, as the safetensors package has it."""
        return _Slice(self, name)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows [start, stop) of a tensor's first dimension.

        Raises:
            WeightError: the file ends before them.
        """
        form = self.tensors[name]
        row = math.prod(form.shape[1:]) * form.dtype.itemsize
        result = torch.empty((stop - start, *form.shape[1:]), dtype=form.dtype, device="cpu")
        if result.numel() == 0:
            return result

        target = result.view(-1).view(torch.uint8).numpy().data
        self._file.seek(self._begins[name] + start * row)
        while target:
            count: int = self._file.readinto(target)  # type: ignore[attr-defined]
            if not count:
                raise WeightError(f"{self._path}: ends in {name}; copy it again")
            target = target[count:]
        return result

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_header(self) -> None:
        size = self._path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if length > min(size - 8, _LARGEST_HEADER_BYTES):
            raise ValueError("the header is longer than the file")

        header = json.loads(self._file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is of type {entry['dtype']}, which is unknown here")
            form = TensorForm(tuple(map(int, entry["shape"])), _DTYPES[entry["dtype"]])
            begin, end = map(int, entry["data_offsets"])
            if end - begin != form.nbytes or begin < 0:
                raise ValueError(f"{name} has {end - begin} bytes and needs {form.nbytes}")
            if 8 + length + end > size:
                raise ValueError(f"the file ends before {name} does")
            self.tensors[name] = form
            self._begins[name] = 8 + length + begin


class _Slice:
    """A tensor of a file."""

    def __init__(self, file: StreamedFile, name: str) -> None:
        self._file = file
        self._name = name

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The elements of an index whose slices have a start and a stop."""
        first = index[0]
        rows = self._file.read_rows(self._name, first.start, first.stop)
        columns = (slice(None), *index[1:])
        return rows[columns]
