"""GLM-4.7-Flash: latent attention as in DeepSeek-V3; a list says which layers have experts.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.deepseek_v3 import REQUIRED, latent_spec
from mrlhf.models.families.dense import refuse_scalar
from mrlhf.models.families.mixture import grouped_experts, grouped_family, with_experts
from mrlhf.models.spec import Experts, Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a GLM-4.7-Flash `config.json`."""
    refuse_scalar(config, head, "Glm4MoeLite")
    return with_experts(latent_spec(config, head), listed_experts(config))


def listed_experts(config: dict[str, Any]) -> Experts:
    """The mixtures of a `config.json` with the keys of DeepSeek-V3's, and a list of layers."""
    kinds = config["mlp_layer_types"]
    if len(kinds) != config["num_hidden_layers"] or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(
            f"config.json has mlp_layer_types={kinds!r}; it must say dense or sparse of each of "
            f"{config['num_hidden_layers']} layers"
        )
    experts = grouped_experts({**config, "first_k_dense_replace": 0})
    return replace(experts, layers=tuple(kind == "sparse" for kind in kinds))


GLM4_MOE_LITE = grouped_family("glm4_moe_lite", "Glm4MoeLite", read_config, REQUIRED)
