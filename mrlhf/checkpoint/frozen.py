"""Recognises the files of a model that is read at every start and never saved.

A checkpoint does not hold the reference and the reward model. It holds a fingerprint of their
files, so that a change is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from mrlhf.errors import CheckpointError

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


def check_frozen(
    stored: Mapping[str, Mapping[str, Any]], current: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse, with a CheckpointError, another frozen model than the run began with."""
    for role in sorted(stored.keys() & current.keys()):
        if stored[role]["files"] != current[role]["files"]:
            raise CheckpointError(
                f"{role}.path {current[role]['path']} does not hold the weights with which the run "
                f"began (those of {stored[role]['path']}); restore them, or begin a new run"
            )
