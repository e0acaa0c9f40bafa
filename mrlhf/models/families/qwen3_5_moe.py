"""Qwen3.5 with experts, text alone: as Qwen3.5, with a mixture and a shared expert in every layer.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families import qwen3_5
from mrlhf.models.families.dense import REQUIRED_KEYS, refuse_scalar, require_values
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import SHARED_EXPERT_KEYS, mixture_family, with_shared_expert
from mrlhf.models.families.qwen3_next import HYBRID_KEYS
from mrlhf.models.spec import Head, ModelSpec

_ONLY = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of the language model of a Qwen3.5 `config.json` with experts."""
    refuse_scalar(config, head, "Qwen3_5Moe")
    require_values(config, _ONLY)
    # No layer has the dense MLP whose width the file does not state.
    dense = qwen3_5.read_config(
        {**config, "intermediate_size": config["moe_intermediate_size"]}, head
    )
    return with_shared_expert(replace(dense, hf_config=config), {**config, **_ONLY})


QWEN3_5_MOE = replace(
    mixture_family("qwen3_5_moe_text", "Qwen3_5Moe", read_config, ExpertNames(), ()),
    wrapper="qwen3_5_moe",
    required_keys=(
        *(key for key in REQUIRED_KEYS if key != "intermediate_size"),
        *(*SHARED_EXPERT_KEYS, *HYBRID_KEYS),
    ),
    ignored_prefixes=qwen3_5.QWEN3_5.ignored_prefixes,
)
