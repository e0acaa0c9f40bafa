"""gpt-oss: attention with sinks, alternating windows, and experts with biases and clamped gates.

This file knows only what its `config.json` may say, and how its checkpoints name experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_spec, with_layer_types
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.mixture import (
    count,
    mixture_family,
    stacked_experts,
    with_experts,
)
from mrlhf.models.spec import ClampedSwish, Experts, Head, ModelSpec

_NAMES = ExpertNames(
    router="mlp.router.weight", gate="gate_up_proj", up=None, alternates=True, down="down_proj"
)


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a gpt-oss `config.json`."""
    for key in ("swiglu_alpha", "swiglu_limit"):
        value = config[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"config.json has {key}={value!r}; it must be a number above 0")

    bias = bool(config["attention_bias"])
    spec = replace(
        with_layer_types(dense_spec(config, head)), qkv_bias=bias, o_bias=bias, has_sinks=True
    )

    experts = Experts(
        count=count(config, "num_local_experts", least=2),
        per_token=count(config, "num_experts_per_tok"),
        ffn_size=config["intermediate_size"],
        layers=(True,) * spec.num_layers,
        # The softmax over the chosen experts is that over all, divided by its sum over the chosen.
        normalised=True,
        has_biases=True,
        activation=ClampedSwish(float(config["swiglu_alpha"]), float(config["swiglu_limit"])),
    )
    return with_experts(spec, experts)


_MORE_KEYS = ("num_local_experts", "num_experts_per_tok", "num_key_value_heads", "head_dim")
GPT_OSS = replace(
    mixture_family("gpt_oss", "GptOss", read_config, _NAMES, (*_MORE_KEYS, "sliding_window")),
    other_forms=partial(stacked_experts, names=_NAMES, in_mxfp4=(False, True)),
    written_forms=partial(stacked_experts, names=_NAMES),
    quantisations=("mxfp4",),
)
