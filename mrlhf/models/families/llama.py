"""Llama: dense, without biases.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_family, dense_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Llama `config.json`.

    Raises:
        ConfigError: the model has biases.
    """
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigError(
            "config.json sets attention_bias or mlp_bias: biases on o_proj and the MLP are not "
            "supported"
        )
    return dense_spec(config, head, qkv_bias=False, qk_norm=False, sliding_window=None)


LLAMA = dense_family("llama", "Llama", read_config)
