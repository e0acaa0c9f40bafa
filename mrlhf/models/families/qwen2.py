"""Qwen2 and Qwen2.5: as Llama, with biases on q, k and v.

This file knows only what their `config.json` may say.
"""

from __future__ import annotations

from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_family, dense_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen2 `config.json`.

    Raises:
        ConfigError: some layers use a sliding window and others do not.
    """
    if config.get("use_sliding_window"):
        raise ConfigError(
            "config.json sets use_sliding_window: set it to false, mixed windows are not supported"
        )
    return dense_spec(config, head, qkv_bias=True, qk_norm=False, sliding_window=None)


QWEN2 = dense_family("qwen2", "Qwen2", read_config)
