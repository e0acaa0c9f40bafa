"""Qwen2-MoE and Qwen1.5-MoE: as Qwen2, with a mixture of experts and a gated shared expert.

This file knows only what their `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_spec, with_layer_types
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import (
    SHARED_EXPERT_KEYS,
    mixture_family,
    with_shared_expert,
)
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen2-MoE `config.json`."""
    spec = replace(with_layer_types(dense_spec(config, head)), qkv_bias=bool(config["qkv_bias"]))
    return with_shared_expert(spec, config)


QWEN2_MOE = mixture_family(
    "qwen2_moe",
    "Qwen2Moe",
    read_config,
    ExpertNames(),
    SHARED_EXPERT_KEYS,
)
