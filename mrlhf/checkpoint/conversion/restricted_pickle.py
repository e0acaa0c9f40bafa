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

# Module and name of a class or function, as a pickle states them.
Name = tuple[str, str]


class Placeholder:
    """Stands for an object of a class that was not allowed; it keeps nothing."""

    def __new__(cls, *arguments: Any, **options: Any) -> Placeholder:
        """Ignore the arguments."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def _ignore(self, *arguments: Any) -> None:
        pass

    # What a pickle may do to an object, a dictionary and a list.
    __setstate__ = __setitem__ = append = extend = _ignore


class _RestrictedUnpickler(pickle.Unpickler):
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


def read_pickle(
    file: Path, allowed: Mapping[Name, Any], offset: int = 0, length: int = -1
) -> tuple[Any, set[str]]:
    """The object in a pickle file or a file of `torch.save`, without tensors; and refused names.

    It takes `length` bytes of the file from `offset`, by default all. A CheckpointError says that
    the file is missing, damaged, or of a torch older than 1.6.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            content = stream.read(length)
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                (record,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                content = archive.read(record)
        unpickler = _RestrictedUnpickler(io.BytesIO(content), allowed)
        return unpickler.load(), unpickler.refused
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{file}: not readable: {reason}") from error
