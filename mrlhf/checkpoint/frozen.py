"""Recognises files that are read at every start and never saved: of models, adapters and data.

A checkpoint does not hold the reference, the reward model, the base of adapters, the adapter from
which a run starts, nor its rows. It holds fingerprints of their files, so that a change is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from mrlhf.config.sections import LoraSection
from mrlhf.data.hub_files import read_object
from mrlhf.errors import CheckpointError, WeightError
from mrlhf.weights.stored import ADAPTER_CONFIG, ADAPTER_WEIGHTS

ROWS = "data.train_files"  # their fingerprint stands beside those of models
_HASHED_END_BYTES = 64 * 2**10  # read at once; of a model, at each end of a file


def hash_of(file: Path) -> str:
    """A hash of both ends of a model's file, or of all of another one.

    Hashing all of a model's file would take as long as loading the model. The beginning of a
    safetensors file lists its tensors.
    """
    size = file.stat().st_size
    begins: Sequence[int] = range(0, size, _HASHED_END_BYTES)
    if file.suffix == ".safetensors" and file.name != ADAPTER_WEIGHTS:
        begins = (0, max(0, size - _HASHED_END_BYTES))
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        for begin in begins:
            stream.seek(begin)
            digest.update(stream.read(_HASHED_END_BYTES))
    return digest.hexdigest()


def fingerprint(directory: str | Path) -> dict[str, Any]:
    """Size and hash of each weight file of a Hugging Face model, or of the files of an adapter."""
    place = Path(directory)
    found = [*sorted(place.glob("*.safetensors")), *place.glob(ADAPTER_CONFIG)]
    files = {file.name: [file.stat().st_size, hash_of(file)] for file in found}
    return {"path": str(directory), "files": files}


def fingerprint_of_start(section: LoraSection) -> dict[str, Any]:
    """Of the adapter from which a run starts; of new ones, the keys that their weights lack."""
    if section.path is not None:
        return fingerprint(section.path)
    return {"path": None, "files": {"alpha": section.alpha, "use_rslora": section.use_rslora}}


def fingerprint_of_rows(files: Sequence[str]) -> dict[str, Any]:
    """Hash of each file of rows, all of it, in their order."""
    return {"path": ", ".join(files), "files": [hash_of(Path(file)) for file in files]}


def check_frozen(
    stored: Mapping[str, Mapping[str, Any]], current: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse, with a CheckpointError, other models, adapters or rows than the run began with."""
    for role in sorted(stored.keys() & current.keys()):
        if stored[role]["files"] != current[role]["files"]:
            holds = "give the adapter" if role.endswith(".lora") else "hold the weights"
            if role == ROWS:
                holds = "hold the rows, in their order,"
            raise CheckpointError(
                f"{_in_words(role, current[role])} does not {holds} with which the run began (as "
                f"did {_in_words(role, stored[role])}); restore that, or begin a new run"
            )


def _in_words(role: str, start: Mapping[str, Any]) -> str:
    if role == ROWS:
        return f"{role} {start['path']}"
    keys = start["files"] if start["path"] is None else {"path": start["path"]}
    return ", ".join(f"{role}.{key} {value}" for key, value in keys.items())


def check_base(adapter: str | Path, base: str | Path) -> tuple[str, ...]:
    """Return remarks on the base that an adapter names; WeightError if it has other weights."""
    file = Path(adapter) / ADAPTER_CONFIG
    stated = read_object(file, WeightError).get("base_model_name_or_path") or str(base)
    theirs = fingerprint(stated)["files"] if os.path.isdir(stated) else {}
    if theirs and theirs != fingerprint(base)["files"]:
        raise WeightError(
            f"{file}: the adapter is of {stated!r}, which holds other weights than {base}; name "
            "that as the base, or if they are the same model, name it in base_model_name_or_path"
        )
    if theirs or Path(stated).name.lower() in str(base).lower():
        return ()
    return (f"{file}: the adapter is of {stated!r}; make sure that {base} holds that model",)
