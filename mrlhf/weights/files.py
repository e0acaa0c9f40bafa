"""The files of a Hugging Face checkpoint: which file holds which tensor, and how files are named.

A checkpoint is one `model.safetensors`, or several files and an index that names them. This file
knows names and sizes; `stored` reads what the files hold. It does not know tensors or ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from mrlhf.weights.stored import INDEX, SINGLE

_ANY = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def split_files(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Cut the names of `sizes` (bytes a tensor), in order, into files of at most `max_shard_bytes`.

    A larger tensor has a file of its own.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def file_names(count: int) -> list[str]:
    """The names of a checkpoint's `count` files, as transformers names them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def temporary(file: Path) -> Path:
    """Where `file` is written until the checkpoint is complete."""
    return file.with_name(f".{file.name}.tmp")


def open_to_readers(file: Path) -> None:
    """Give `file` the mode that the user's umask gives to new files.

    safetensors writes files that only their owner can read.
    """
    # To read the umask, a process must set it, which other threads would feel. So a new file tells
    # it.
    probe = file.with_name(f"{file.name}.mode")
    probe.touch()
    file.chmod(probe.stat().st_mode & 0o777)
    probe.unlink()


def flush(file: Path) -> None:
    """Wait until a file is on disk; a network file system says only then that it is full."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def publish(directory: Path, files: Mapping[str, list[str]], total_bytes: int) -> None:
    """Put complete temporary files in the place of an earlier checkpoint.

    `files` gives the names of the tensors in each file, `total_bytes` is the size of all tensors.
    """
    index = directory / INDEX
    # The old index goes first and the new one comes last, so that an index never names a file that
    # is not there.
    index.unlink(missing_ok=True)
    for old in directory.iterdir():
        if _ANY.fullmatch(old.name) and old.name not in files:
            old.unlink()
    for file in files:
        temporary(directory / file).replace(directory / file)

    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        temporary(index).write_text(json.dumps(content, indent=2))
        temporary(index).replace(index)
