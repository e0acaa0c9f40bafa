"""SmolLM3: as Llama, with layers that do not rotate, and with a window on some of these.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_family, dense_spec, with_layer_types
from mrlhf.models.spec import WHOLE_MODEL, Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a SmolLM3 `config.json`."""
    spec = with_layer_types(dense_spec(config, head))
    if spec.sliding_window is not None and not config["use_sliding_window"]:
        raise ConfigError(
            "config.json has layers of sliding_attention and use_sliding_window=false; "
            "transformers then has a window or not, depending on its attention: set it to true"
        )

    rotates = config["no_rope_layers"]
    if len(rotates) < spec.num_layers:
        raise ConfigError(
            f"config.json has {len(rotates)} no_rope_layers and "
            f"num_hidden_layers={spec.num_layers}; give one for each layer"
        )
    bias = bool(config["attention_bias"])
    return replace(
        spec,
        # In spite of its name, a layer that is listed with 1 rotates.
        ropes=tuple(WHOLE_MODEL if flag else None for flag in rotates[: spec.num_layers]),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config["mlp_bias"]),
    )


SMOLLM3 = dense_family("smollm3", "SmolLM3", read_config)
