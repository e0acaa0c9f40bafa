"""Mistral: as Llama, with an optional sliding window.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from typing import Any

from mrlhf.models.families.dense import dense_family, dense_spec, with_window
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Mistral `config.json`."""
    return with_window(dense_spec(config, head))


MISTRAL = dense_family("mistral", "Mistral", read_config)
