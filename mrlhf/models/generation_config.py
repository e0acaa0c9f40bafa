"""Reads which tokens end a response from a model's files, and copies `generation_config.json`.

It does not know tokenizers or engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError

__all__ = ["end_token_ids", "read_generation_config", "write_generation_config"]

_FILE = "generation_config.json"


def end_token_ids(directory: str | Path) -> dict[int, str]:
    """Return the tokens that end a response, with the name of the file that names each.

    `config.json` and `generation_config.json` may name one token or a list, as `eos_token_id`.

    Raises:
        ConfigError: a file cannot be read, or its `eos_token_id` is neither.
    """
    ids: dict[int, str] = {}
    for name in ("config.json", _FILE):
        file = Path(directory) / name
        if file.is_file():
            stated = read_object(file, ConfigError)
            # A model that also reads images states those of its language model within.
            within = stated.get("text_config")
            for part in (stated, within if isinstance(within, dict) else {}):
                ids |= dict.fromkeys(_token_ids(file, part.get("eos_token_id")), name)
    return ids


def read_generation_config(directory: str | Path) -> str | None:
    """The text of `generation_config.json`; None without, ConfigError if it is wrong."""
    file = Path(directory) / _FILE
    if not file.is_file():
        return None
    stated = read_object(file, ConfigError)
    try:
        GenerationConfig.from_dict(stated)
    except Exception as error:  # of many types, each with its own way to say that a value is wrong
        raise ConfigError(
            f"{file}: transformers refuses it: {' '.join(str(error).split())}"
        ) from error
    return file.read_text(encoding="utf-8")


def write_generation_config(text: str, directory: Path) -> None:
    """Write the text that `read_generation_config` returned into another model's directory."""
    (directory / _FILE).write_text(text, encoding="utf-8")


def _token_ids(file: Path, stated: Any) -> list[int]:
    """Return the token ids in an `eos_token_id`: none, one or several."""
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int):
            raise ConfigError(
                f"{file}: eos_token_id must be a token id or a list of them, not {stated!r}"
            )
    return ids
