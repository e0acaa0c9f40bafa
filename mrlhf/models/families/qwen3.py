"""Qwen3 (dense): as Llama, with RMSNorm on each head of q and k, and a window on some layers.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_family, dense_spec, with_layer_types
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen3 `config.json`."""
    bias = bool(config["attention_bias"])
    spec = with_layer_types(dense_spec(config, head))
    return replace(spec, qk_norm="head", qkv_bias=bias, o_bias=bias)


QWEN3 = dense_family("qwen3", "Qwen3", read_config)
