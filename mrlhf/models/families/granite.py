"""Granite 3 (dense): as Llama, with multipliers on embeddings, residuals, attention and logits.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_family, dense_spec, refuse_scalar
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Granite `config.json`."""
    refuse_scalar(config, head, "Granite")
    divisor = float(config["logits_scaling"])
    if divisor == 0:
        raise ConfigError("config.json has logits_scaling=0; it must not be 0")

    bias = bool(config["attention_bias"])
    return replace(
        dense_spec(config, head),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config["mlp_bias"]),
        embedding_multiplier=float(config["embedding_multiplier"]),
        residual_multiplier=float(config["residual_multiplier"]),
        attention_multiplier=float(config["attention_multiplier"]),
        logits_divisor=divisor,
    )


GRANITE = dense_family("granite", "Granite", read_config)
