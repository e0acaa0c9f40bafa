"""Reads pickled data from others without running any code that it names.

A pickle names classes and functions, which an ordinary reader imports and calls. This reader allows
only the names in its caller's list. For any other name it returns a placeholder that does nothing,
and remembers the name. It does not know what the data mean.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mrlhf.errors import CheckpointError

Name = tuple[str, str]
"""Module and name of a class or function, as a pickle states them."""


class Placeholder:
    """Stands for an object of a class that was not allowed; it keeps nothing."""

    def __new__(cls, *arguments: Any, **options: Any) -> Placeholder:
        """Ignore the arguments."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Ignore an item, if the object was a list."""

    def extend(self, items: Any) -> None:
        """Ignore items, if the object was a list."""


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler of allowed names only; `refused` holds the others, as "module.name"."""

    def __init__(self, file: BinaryIO, allowed: Mapping[Name, Any]) -> None:
        super().__init__(file)
        self._allowed = allowed
        self.refused: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        """The allowed object of that name, or the placeholder class."""
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        self.refused.add(f"{module}.{name}")
        return Placeholder

    def persistent_load(self, identifier: Any) -> Placeholder:
        """Skip a tensor: torch keeps its numbers outside the pickle."""
        return Placeholder()


def read_pickle(file: Path, allowed: Mapping[Name, Any]) -> Any:
    """Read the object in a pickle file; CheckpointError if that is not possible with `allowed`."""
    try:
        return _load(io.BytesIO(file.read_bytes()), allowed)[0]
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{file}: not readable: {_one_line(error)}") from error


def read_torch_file(file: Path, allowed: Mapping[Name, Any]) -> tuple[Any, set[str]]:
    """Read the object in a file of `torch.save`, without its tensors, and the refused names.

    Raises:
        CheckpointError: the file is missing, damaged, or of a torch older than 1.6.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            (record,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return _load(io.BytesIO(archive.read(record)), allowed)
    except Exception as error:  # a damaged archive or pickle may raise anything
        raise CheckpointError(f"{file}: not readable: {_one_line(error)}") from error


def _load(stream: BinaryIO, allowed: Mapping[Name, Any]) -> tuple[Any, set[str]]:
    unpickler = RestrictedUnpickler(stream, allowed)
    loaded = unpickler.load()
    return loaded, unpickler.refused


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
