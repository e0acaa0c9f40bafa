"""DeepSeek-V3 and R1, Kimi-K2, text of Kimi-K2.5, Moonlight: latents, and experts as in GLM-4.5.

This file knows only what their `config.json` may say, and how their checkpoints name tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_spec, require_values
from mrlhf.models.families.mixture import (
    GROUPED_KEYS,
    draft_layers,
    grouped_experts,
    grouped_family,
    with_experts,
)
from mrlhf.models.spec import Head, Latent, ModelSpec

# What transformers computes whatever these keys say, which it does not know.
_ONLY = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
# How names begin of what reads images in Kimi-K2.5, as published and as transformers writes it.
_READS_IMAGES = tuple(
    f"{start}{part}." for start in ("", "model.") for part in ("vision_tower", "mm_projector")
)


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a DeepSeek-V3 `config.json`."""
    return with_experts(latent_spec(config, head), grouped_experts(config))


def latent_spec(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec with latent attention, without experts; ConfigError if something is not built."""
    family = config["model_type"]
    require_values(config, _ONLY)
    if config["attention_bias"]:
        raise ConfigError(
            f"config.json sets attention_bias, which is not supported in a {family} model"
        )
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise ConfigError(
            f"config.json has num_key_value_heads={config['num_key_value_heads']} and "
            f"num_attention_heads={config['num_attention_heads']}; with latent attention they are "
            "equal"
        )

    rotary_dim = config["qk_rope_head_dim"]
    latent = Latent(
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        interleaved=bool(config["rope_interleave"]),
    )
    head_dim = latent.plain_dim + rotary_dim
    if rotary_dim % 2 or latent.value_dim > head_dim:
        raise ConfigError(
            f"config.json has qk_rope_head_dim={rotary_dim}, which must be even, and "
            f"v_head_dim={latent.value_dim}, which may be at most qk_nope_head_dim + "
            f"qk_rope_head_dim = {head_dim}"
        )

    return replace(
        # The rotation is that of heads which have the rotated dimensions alone.
        dense_spec({**config, "head_dim": rotary_dim}, head),
        head_dim=head_dim,
        latent=latent,
        attention_multiplier=_scale(config["rope_parameters"]) * head_dim**-0.5,
    )


def _scale(rope: dict[str, Any]) -> float:
    """What products of q and k are multiplied with for a longer context, in yarn."""
    factor = rope.get("factor", 1.0)
    if rope["rope_type"] == "default" or factor <= 1 or not rope.get("mscale_all_dim"):
        return 1.0
    return float((0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0) ** 2)


REQUIRED = (
    *GROUPED_KEYS,
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
"""What the `config.json` of a model with latent attention and experts must state."""

DEEPSEEK_V3 = replace(
    grouped_family("deepseek_v3", "DeepseekV3", read_config, REQUIRED),
    ignored_prefixes=lambda spec: (*draft_layers(spec), *_READS_IMAGES),
    wrapper="kimi_k25",
    renamed=("kimi_k2",),
)
