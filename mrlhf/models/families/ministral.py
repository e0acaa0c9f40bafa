"""Ministral: as Mistral, with a sliding window on some layers.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from typing import Any

from mrlhf.models.families.dense import dense_family, dense_spec, with_layer_types
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Ministral `config.json`."""
    return with_layer_types(dense_spec(config, head))


MINISTRAL = dense_family("ministral", "Ministral", read_config)
