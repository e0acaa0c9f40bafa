"""Recognises the files of models and data that are read at every start and never saved.

A checkpoint holds a fingerprint of them, so that a change is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mrlhf.errors import CheckpointError

ROWS = "data.train_files"  # their fingerprint stands beside those of models
_HASHED_END_BYTES = 64 * 2**10  # at each end of a file


def fingerprint(directory: str | Path) -> dict[str, Any]:
    """Size and hash of both ends of each weight file of a Hugging Face model."""
    files = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        # The beginning of a safetensors file lists its tensors. Hashing all of the file would take
        # as long as loading the model.
        size = file.stat().st_size
        with file.open("rb") as stream:
            digest = xxhash.xxh3_64(stream.read(_HASHED_END_BYTES))
            stream.seek(max(0, size - _HASHED_END_BYTES))
            digest.update(stream.read(_HASHED_END_BYTES))
        files[file.name] = [size, digest.hexdigest()]
    return {"path": str(directory), "files": files}


def fingerprint_of_rows(files: Sequence[str]) -> dict[str, Any]:
    """Hash of each file of rows, all of it, in their order."""
    hashes = [xxhash.xxh3_64(Path(file).read_bytes()).hexdigest() for file in files]
    return {"path": ", ".join(files), "files": hashes}


def check_frozen(
    stored: Mapping[str, Mapping[str, Any]], current: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse, with a CheckpointError, other frozen models or rows than the run began with."""
    for role in sorted(stored.keys() & current.keys()):
        if stored[role]["files"] != current[role]["files"]:
            key, what = (
                (ROWS, "rows, in their order,") if role == ROWS else (f"{role}.path", "weights")
            )
            raise CheckpointError(
                f"{key} {current[role]['path']} does not hold the {what} with which the run "
                f"began (those of {stored[role]['path']}); restore them, or begin a new run"
            )
