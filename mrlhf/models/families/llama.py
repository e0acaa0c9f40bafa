"""Llama: dense, with biases on attention and MLP where its `config.json` asks for them.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_family, dense_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Llama `config.json`."""
    bias = bool(config["attention_bias"])
    return replace(
        dense_spec(config, head), qkv_bias=bias, o_bias=bias, mlp_bias=bool(config["mlp_bias"])
    )


LLAMA = dense_family("llama", "Llama", read_config)
