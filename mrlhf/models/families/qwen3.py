"""Qwen3 (dense): as Llama, with RMSNorm on each head of q and k.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_family, dense_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen3 `config.json`.

    Raises:
        ConfigError: the model uses a sliding window or biases.
    """
    if config.get("use_sliding_window"):
        raise ConfigError(
            "config.json sets use_sliding_window: set it to false, mixed windows are not supported"
        )
    if config.get("attention_bias"):
        raise ConfigError("config.json sets attention_bias: a bias on o_proj is not supported")
    return dense_spec(config, head, qkv_bias=False, qk_norm=True, sliding_window=None)


QWEN3 = dense_family("qwen3", "Qwen3", read_config)
