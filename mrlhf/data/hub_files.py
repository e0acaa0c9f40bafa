"""Reads the files of a hub of models: JSON objects, and the pointers of Git LFS for large files.

This file does not know what the files mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrlhf.errors import MrlhfError

_POINTER = b"version https://git-lfs"


def read_object(file: Path, refusal: type[MrlhfError]) -> dict[str, Any]:
    """Read the JSON object in a file; if that fails, the error is of the type `refusal`."""
    refuse_pointer(file, refusal)
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(stated, dict):
        raise refusal(f"{file}: a JSON object is needed, not {type(stated).__name__}")
    return stated


def refuse_pointer(file: Path, refusal: type[MrlhfError]) -> None:
    """Refuse a Git LFS pointer, which `git clone` may leave, and anything but a file."""
    # A reader of a pipe or a device might wait for ever.
    if file.exists() and not file.is_file():
        raise refusal(f"{file}: not readable: it is a directory, a pipe or a device; copy a file")
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_POINTER))
    except OSError:
        return
    if start == _POINTER:
        raise refusal(
            f"{file}: a Git LFS pointer and not the file itself; run `git lfs pull` there"
        ) from None
