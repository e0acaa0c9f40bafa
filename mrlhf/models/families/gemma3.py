"""Gemma 3, text alone: norms around attention and MLP, gates with GELU, windows on most layers.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import (
    REQUIRED_KEYS,
    dense_family,
    dense_spec,
    read_by_layer_type,
)
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Gemma 3 `config.json`."""
    if config["hidden_activation"] != "gelu_pytorch_tanh":
        raise ConfigError(
            f"config.json has hidden_activation={config['hidden_activation']!r}; only "
            "gelu_pytorch_tanh is supported"
        )
    if config["query_pre_attn_scalar"] <= 0:
        raise ConfigError(
            f"config.json has query_pre_attn_scalar={config['query_pre_attn_scalar']}; it must be "
            "above 0"
        )
    for key in ("attention_bias", "use_bidirectional_attention"):
        if config[key]:
            raise ConfigError(f"config.json sets {key}, which is not supported in a Gemma model")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config[key] is not None:
            raise ConfigError(f"config.json sets {key}, which is not supported; set it to null")
    return read_by_layer_type(config, head, _read_uniform)


def _read_uniform(config: dict[str, Any], head: Head) -> ModelSpec:
    return replace(
        dense_spec({**config, "hidden_act": "silu"}, head),
        qk_norm="head",
        norms="both",
        norms_add_one=True,
        activation="gelu_tanh",
        embedding_multiplier=math.sqrt(config["hidden_size"]),
        rounds_multiplier=True,
        attention_multiplier=config["query_pre_attn_scalar"] ** -0.5,
    )


# transformers would complete the last ones with those of a larger model.
_MORE_KEYS = ("num_key_value_heads", "head_dim", "query_pre_attn_scalar", "sliding_window")
GEMMA3 = replace(
    dense_family("gemma3_text", "Gemma3", read_config),
    classifier_stem="Gemma3Text",
    window_base_key="rope_local_base_freq",
    required_keys=(*REQUIRED_KEYS, *_MORE_KEYS),
)
