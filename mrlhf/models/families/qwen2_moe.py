"""Qwen2-MoE and Qwen1.5-MoE: as Qwen2, with a mixture of experts and a gated shared expert.

This file knows only what their `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_spec, with_layer_types
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import count, mixture_family, stated_experts, with_experts
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen2-MoE `config.json`."""
    spec = replace(with_layer_types(dense_spec(config, head)), qkv_bias=bool(config["qkv_bias"]))
    experts = replace(
        stated_experts(config),
        shared_ffn_size=count(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return with_experts(spec, experts)


QWEN2_MOE = mixture_family(
    "qwen2_moe",
    "Qwen2Moe",
    read_config,
    ExpertNames(),
    (
        "num_experts or num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
)
