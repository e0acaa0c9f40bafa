"""Published models: the sizes of those that shipped configurations name, and how to get one.

The sizes serve plans and dry runs where a model is not on this machine; no run reads them.
"""

from __future__ import annotations

from pathlib import Path

from mrlhf.version import shipped


def published_model(path: str) -> Path | None:
    """The shipped directory with the `config.json` of the model that a path is named for."""
    for config in shipped().glob("configs/gpu/models/*/*/config.json"):
        if config.parent.name == Path(path).name:
            return config.parent
    return None


def how_to_get(path: str, file: str = "") -> str:
    """A hint with the command that gets a model, or one file of it; empty if none is known."""
    place = published_model(path)
    if place is None:
        return ""
    name = f"{place.parent.name}/{place.name}"
    words = " ".join(["hf download", name, *filter(None, [file]), "--local-dir", path])
    return f"; {words} gets it"
