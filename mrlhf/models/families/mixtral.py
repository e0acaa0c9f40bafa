"""Mixtral: as Mistral, with a mixture of experts in every layer.

This file knows only what its `config.json` may say, and how its checkpoints name experts.
"""

from __future__ import annotations

from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_spec, with_window
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import count, mixture_family, with_experts
from mrlhf.models.spec import Experts, Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Mixtral `config.json`."""
    if config["router_jitter_noise"]:
        raise ConfigError(
            f"config.json has router_jitter_noise={config['router_jitter_noise']}, which is not "
            "supported: old and current log-probabilities would differ; set it to 0"
        )
    if config.get("head_dim") is None:  # as transformers takes it then
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        config = {**config, "head_dim": head_dim}

    experts = Experts(
        count=count(config, "num_local_experts", least=2),
        per_token=count(config, "num_experts_per_tok"),
        ffn_size=config["intermediate_size"],
        layers=(True,) * config["num_hidden_layers"],
        normalised=True,
    )
    return with_experts(with_window(dense_spec(config, head)), experts)


MIXTRAL = mixture_family(
    "mixtral",
    "Mixtral",
    read_config,
    ExpertNames(
        router="block_sparse_moe.gate.weight",
        experts="block_sparse_moe.experts",
        gate="w1.weight",
        up="w3.weight",
        down="w2.weight",
    ),
    ("num_local_experts", "num_experts_per_tok"),
)
