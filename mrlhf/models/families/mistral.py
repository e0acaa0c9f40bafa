"""Mistral: Llama with an optional sliding window. It knows the config mapping; tensors are named as
Llama's.
"""

from __future__ import annotations

from typing import Any

from mrlhf.models.families.llama import dense_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Mistral `config.json`."""
    return dense_spec(
        config, head, qkv_bias=False, qk_norm=False, sliding_window=config.get("sliding_window")
    )
