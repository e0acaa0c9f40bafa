"""Qwen2 and Qwen2.5: as Llama, with biases on q, k and v, and a window on some layers.

This file knows only what their `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_family, dense_spec, with_layer_types
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen2 `config.json`."""
    return replace(with_layer_types(dense_spec(config, head)), qkv_bias=True)


QWEN2 = dense_family("qwen2", "Qwen2", read_config)
