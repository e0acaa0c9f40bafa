"""GLM-4.5, 4.6 and 4.7: heads that rotate in part, and experts that are chosen by sigmoid scores.

The first layers are dense; the others have a mixture and a shared expert. This file knows only what
their `config.json` may say, and how their checkpoints name tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_spec
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import count, mixture_family, with_experts
from mrlhf.models.spec import Experts, Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a GLM-4.5 `config.json`."""
    if head == "scalar":
        raise ConfigError(
            "a critic or reward model cannot be a glm4_moe model, because transformers has no "
            "Glm4MoeForSequenceClassification; use a model of another family"
        )
    scale = config["routed_scaling_factor"]
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not 0 < scale < math.inf:
        raise ConfigError(
            f"config.json has routed_scaling_factor={scale!r}; it must be a number above 0"
        )

    spec = replace(
        dense_spec(config, head, partial_rotary=True),
        qkv_bias=bool(config["attention_bias"]),
        qk_norm="head" if config["use_qk_norm"] else "none",
    )
    first = count(config, "first_k_dense_replace", least=0)
    ffn_size = count(config, "moe_intermediate_size")
    experts = Experts(
        count=count(config, "n_routed_experts", "num_local_experts", least=2),
        per_token=count(config, "num_experts_per_tok"),
        ffn_size=ffn_size,
        layers=tuple(layer >= first for layer in range(spec.num_layers)),
        scoring="sigmoid",
        normalised=bool(config["norm_topk_prob"]),
        scale=float(scale),
        groups=count(config, "n_group"),
        groups_per_token=count(config, "topk_group"),
        has_correction=True,
        shared_ffn_size=ffn_size * count(config, "n_shared_experts"),
    )
    return with_experts(spec, experts)


def draft_layers(spec: ModelSpec) -> tuple[str, ...]:
    """The beginning of the names of the draft model's tensors, which nothing here reads."""
    stated = spec.hf_config.get("num_nextn_predict_layers")
    first = spec.num_layers
    return tuple(f"model.layers.{layer}." for layer in range(first, first + (stated or 0)))


GLM4_MOE = replace(
    mixture_family(
        "glm4_moe",
        "Glm4Moe",
        read_config,
        ExpertNames(shared="mlp.shared_experts"),
        ("n_routed_experts or num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    ignored_prefixes=draft_layers,
    float32_endings=(ExpertNames().correction,),
)
