"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and experts.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_spec
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import (
    SHARED_EXPERT_KEYS,
    count,
    mixture_family,
    with_shared_expert,
)
from mrlhf.models.spec import WHOLE_MODEL, DeltaNet, Head, ModelSpec

_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
HYBRID_KEYS = ("num_key_value_heads", "head_dim", *_SIZES)
"""What the `config.json` of such a model must state beside what every model must."""


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Qwen3-Next `config.json`."""
    return with_shared_expert(hybrid_spec(config, head), config)


def hybrid_spec(config: dict[str, Any], head: Head, fused_tensors: bool = True) -> ModelSpec:
    """The spec of a `config.json` with delta nets, without experts; see `DeltaNet`."""
    if config["attention_bias"]:
        raise ConfigError(
            "config.json sets attention_bias, which is not supported in a "
            f"{config['model_type']} model"
        )
    key_heads, value_heads, key_dim, value_dim = (count(config, key) for key in _SIZES[:4])
    if value_heads % key_heads:
        raise ConfigError(
            f"config.json has linear_num_value_heads={value_heads}, which must be a multiple of "
            f"linear_num_key_heads={key_heads}"
        )
    is_delta = _is_delta(config)
    net = DeltaNet(
        layers=is_delta,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=count(config, _SIZES[4], least=2),
        fused_tensors=fused_tensors,
    )

    return replace(
        dense_spec(config, head, partial_rotary=True),
        qk_norm="head",
        norm_offset=1.0,
        output_gate=True,
        ropes=tuple(None if delta else WHOLE_MODEL for delta in is_delta),
        delta=net if any(is_delta) else None,
    )


def _is_delta(config: dict[str, Any]) -> tuple[bool, ...]:
    """For each layer whether it is a delta net; ConfigError if `layer_types` say something else."""
    types = config["layer_types"]
    if set(types) - {"linear_attention"} != {"full_attention"}:
        raise ConfigError(
            f"config.json has layer_types {', '.join(sorted(set(types)))}; only full_attention, in "
            f"one layer at least, and linear_attention are supported in a {config['model_type']} "
            "model"
        )
    return tuple(kind == "linear_attention" for kind in types)


QWEN3_NEXT = replace(
    mixture_family(
        "qwen3_next",
        "Qwen3Next",
        read_config,
        ExpertNames(),
        (*SHARED_EXPERT_KEYS, *HYBRID_KEYS),
    ),
    ignored_prefixes=lambda spec: ("mtp.",),  # the layers of a draft model
)
