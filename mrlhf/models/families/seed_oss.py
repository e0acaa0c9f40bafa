"""Seed-OSS: as Llama, with biases on q, k and v and on the output of attention, each by itself.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_family, dense_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Seed-OSS `config.json`."""
    return replace(
        dense_spec(config, head),
        qkv_bias=bool(config["attention_bias"]),
        o_bias=bool(config["attention_out_bias"]),
        mlp_bias=bool(config["mlp_bias"]),
    )


SEED_OSS = dense_family("seed_oss", "SeedOss", read_config)
