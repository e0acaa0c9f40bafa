"""The user's folder in which compiled code is kept between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """Find a folder that only this user owns, in the home or temporary; OSError if none."""
    temporary = Path(tempfile.gettempdir()) / f"mrlhf-{os.getuid()}"
    for directory in (*_home_caches(), temporary):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            return directory
    raise OSError(f"neither the home's cache folder nor {temporary} can be written to")


def _home_caches() -> list[Path]:
    try:
        return [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mrlhf"]
    except RuntimeError:  # this user has no home
        return []


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        unfinished = Path(scratch) / file.name
        unfinished.write_bytes(content)
        unfinished.replace(file)
