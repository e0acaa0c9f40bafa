"""Gemma 2: norms around attention and MLP, gates with GELU, capped attention and logits.

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
    with_layer_types,
)
from mrlhf.models.spec import Head, ModelSpec

# transformers would complete the last ones with those of another model.
GEMMA_KEYS = (
    *REQUIRED_KEYS,
    *("num_key_value_heads", "head_dim", "query_pre_attn_scalar", "sliding_window"),
)


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Gemma 2 `config.json`."""
    return with_layer_types(gemma_spec(config, head))


def gemma_spec(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a `config.json` of Gemma 2, or of Gemma 3 but for its norms of q and k, whose
    layers all rotate alike and see everything.
    """
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
        if config[key] is not None and config[key] <= 0:
            raise ConfigError(
                f"config.json has {key}={config[key]}; it must be above 0, or null for no cap"
            )

    return replace(
        dense_spec({**config, "hidden_act": "silu"}, head),
        norms="both",
        norm_offset=1.0,
        activation="gelu_tanh",
        embedding_multiplier=math.sqrt(config["hidden_size"]),
        rounds_multiplier=True,
        attention_multiplier=config["query_pre_attn_scalar"] ** -0.5,
        attention_cap=config["attn_logit_softcapping"],
        logits_cap=config["final_logit_softcapping"] if head == "lm" else None,
        hf_config=config,
    )


GEMMA2 = replace(dense_family("gemma2", "Gemma2", read_config), required_keys=GEMMA_KEYS)
