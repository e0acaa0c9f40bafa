"""Rotary embeddings under the names of Megatron-LM's command line, and of `config.json`.

Pure: this file knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.errors import CheckpointError
from mrlhf.models.spec import ModelSpec

# Llama 3's numbers, which are constants in Megatron-LM's code.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM for a rotation, except base and percent."""
    rope = dict(spec.hf_config["rope_parameters"])
    kind = rope.get("rope_type", "default")
    options: dict[str, Any] = {
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
    }

    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3.items()):
        options["use_rope_scaling"] = True
        options["rope_scaling_factor"] = float(rope["factor"])
    elif kind == "linear" and float(rope["factor"]).is_integer():
        options["rotary_seq_len_interpolation_factor"] = int(rope["factor"])
    elif kind != "default":
        raise CheckpointError(
            f"the model rotates with {rope}; Megatron-LM has arguments for Llama 3's "
            f"{_LLAMA3} and for a linear factor that is an integer only"
        )
    return options


def rope_parameters(arguments: Mapping[str, Any], theta: float, family: str) -> dict[str, Any]:
    """The `rope_parameters` in the `config.json` of a checkpoint's model; `theta` is the base."""
    if family == "glm4_moe":
        share = arguments.get("rotary_percent", 1.0)
        return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
    linear = arguments.get("rotary_seq_len_interpolation_factor")
    if arguments.get("use_rope_scaling"):
        factor = float(arguments.get("rope_scaling_factor") or 8.0)
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    if linear is not None:
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(linear)}
    return {"rope_type": "default", "rope_theta": theta}
