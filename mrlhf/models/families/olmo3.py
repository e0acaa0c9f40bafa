"""OLMo-3: as OLMo-2, with a window on some layers, which may rotate otherwise than the rest.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import check_rotations, dense_family, with_layer_types
from mrlhf.models.families.olmo2 import read_config as read_olmo2
from mrlhf.models.rope import check_rope
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of an OLMo-3 `config.json`."""
    by_type = config["rope_parameters"]
    for layer_type in ("full_attention", "sliding_attention"):
        check_rope(by_type[layer_type], partial=False)
    plain = {"rope_type": "default", "rope_theta": by_type["full_attention"]["rope_theta"]}

    uniform = read_olmo2({**config, "model_type": "olmo2", "rope_parameters": plain}, head)
    spec = with_layer_types(replace(uniform, family="olmo3", hf_config=config))
    spec = replace(spec, ropes=tuple(config["layer_types"]))
    check_rotations(spec)
    return spec


OLMO3 = dense_family("olmo3", "Olmo3", read_config)
