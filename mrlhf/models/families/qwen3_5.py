"""Qwen3.5 (dense), text alone: as Qwen3-Next without experts, and with other tensors of delta nets.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import REQUIRED_KEYS, dense_family, require_values
from mrlhf.models.families.qwen3_next import HYBRID_KEYS, hybrid_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of the language model of a Qwen3.5 `config.json`."""
    require_values(config, {"attn_output_gate": True})
    # Sections of rotations are of images: in text, a token has the same position in all of them.
    return hybrid_spec(config, head, fused_tensors=False)


QWEN3_5 = replace(
    dense_family("qwen3_5_text", "Qwen3_5", read_config),
    classifier_stem="Qwen3_5Text",
    wrapper="qwen3_5",
    required_keys=(*REQUIRED_KEYS, *HYBRID_KEYS),
    # The layers of a draft model, and what reads images.
    ignored_prefixes=lambda spec: ("mtp.", "model.visual."),
)
