"""Qwen3-MoE: as Qwen3, with a mixture of experts in most layers.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_spec, with_window
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import mixture_family, stated_experts, with_experts
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen3-MoE `config.json`."""
    bias = bool(config["attention_bias"])
    # transformers puts the window on every layer, or on none.
    spec = replace(
        with_window(dense_spec(config, head)), qk_norm="head", qkv_bias=bias, o_bias=bias
    )
    return with_experts(spec, stated_experts(config))


QWEN3_MOE = mixture_family(
    "qwen3_moe",
    "Qwen3Moe",
    read_config,
    ExpertNames(),
    ("num_experts or num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
