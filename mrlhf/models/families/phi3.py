"""Phi-3 and Phi-4: as Mistral, with fused tensors in checkpoints, and heads that rotate in part.

This file knows only what their `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.models.families.dense import dense_family, dense_spec, with_window
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Phi-3 `config.json`."""
    return replace(with_window(dense_spec(config, head, partial_rotary=True)), fused_tensors=True)


PHI3 = dense_family("phi3", "Phi3", read_config)
