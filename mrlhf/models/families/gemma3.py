"""Gemma 3, text alone: as Gemma 2, with norms of q and k, and a rotation of layers with a window.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_family, read_by_layer_type
from mrlhf.models.families.gemma2 import GEMMA_KEYS, gemma_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Gemma 3 `config.json`."""
    if config["attn_logit_softcapping"] is not None:
        raise ConfigError(
            "config.json sets attn_logit_softcapping, which transformers leaves out of a Gemma 3; "
            "set it to null"
        )
    return replace(read_by_layer_type(config, head, gemma_spec), qk_norm="head")


GEMMA3 = replace(
    dense_family("gemma3_text", "Gemma3", read_config),
    classifier_stem="Gemma3Text",
    window_base_key="rope_local_base_freq",
    required_keys=GEMMA_KEYS,
)
