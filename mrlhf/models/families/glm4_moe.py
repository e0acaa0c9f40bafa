"""GLM-4.5, 4.6 and 4.7: heads that rotate in part, and experts that are chosen by sigmoid scores.

The first layers are dense; the others have a mixture and a shared expert. This file knows only what
their `config.json` may say, and how their checkpoints name tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_spec, refuse_scalar
from mrlhf.models.families.mixture import grouped_experts, grouped_family, with_experts
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a GLM-4.5 `config.json`."""
    refuse_scalar(config, head, "Glm4Moe")
    spec = replace(
        dense_spec(config, head, partial_rotary=True),
        qkv_bias=bool(config["attention_bias"]),
        qk_norm="head" if config["use_qk_norm"] else "none",
    )
    return with_experts(spec, grouped_experts(config))


GLM4_MOE = grouped_family("glm4_moe", "Glm4Moe", read_config)
