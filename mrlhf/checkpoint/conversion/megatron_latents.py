"""Latent attention under the names of Megatron-LM's command line, and of `config.json`.

`megatron_arguments` knows the rest of the model. Pure: this file knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.errors import CheckpointError
from mrlhf.models.spec import ModelSpec

# The sizes of latent attention, and their keys in `config.json`.
LATENT_SIZES = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
# Those of its rotation, with Megatron-LM's defaults.
LATENT_ROPE = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
# DeepSeek-V3's numbers of yarn, which are constants in Megatron-LM's code.
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def latent_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM for latent attention, except those of its rotation."""
    if spec.latent is None:
        return {"multi_latent_attention": False}
    latent = spec.latent
    ranks = (latent.q_rank, latent.kv_rank)
    sizes = (*ranks, latent.plain_dim, spec.rotary_dim, latent.value_dim)
    return {"multi_latent_attention": True, **dict(zip(LATENT_SIZES, sizes, strict=True))}


def latent_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json` for latent attention, except those of its rotation."""
    sizes = {key: arguments.get(name) for name, key in LATENT_SIZES.items()}
    return {**sizes, "head_dim": sizes["qk_rope_head_dim"], "rope_interleave": True}


def latent_rope_arguments(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-LM for the rotation of latent attention."""
    if rope.get("rope_type", "default") == "default":
        return {**LATENT_ROPE, "rope_type": "rope"}
    scales: list[Any] = [rope.get("mscale"), rope.get("mscale_all_dim")]
    if not scales[1]:
        scales = [1.0, 0.0]  # transformers, too, has no use for one of them alone

    stated = {"beta_fast": 32, "beta_slow": 1, "truncate": True, **rope}
    plain = {"rope_type": "yarn", **_YARN, "truncate": True}
    others = stated.keys() - {*plain, "type", "rope_theta", "factor", "mscale", "mscale_all_dim"}
    if others or not scales[0] or any(stated.get(key) != plain[key] for key in plain):
        raise CheckpointError(
            f"the model rotates its latents with {dict(rope)}; Megatron-LM has arguments for "
            f"factor, mscale and mscale_all_dim of yarn with {_YARN} only"
        )
    values = [float(value) for value in (rope["factor"], *scales)]
    return dict(zip(LATENT_ROPE, ("yarn", *values), strict=True))


def stated_latent_rope(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's arguments in the form of `latent_rope_arguments`."""
    stated = {name: arguments.get(name) or default for name, default in LATENT_ROPE.items()}
    is_plain = stated["rope_type"] == "rope" and not stated["mscale_all_dim"]
    if is_plain or stated["rotary_scaling_factor"] == 1:
        return {**LATENT_ROPE, "rope_type": "rope"}
    return stated


def latent_rope_parameters(arguments: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The `rope_parameters` of a checkpoint's model; `theta` is the base."""
    kind, factor, mscale, all_dim = stated_latent_rope(arguments).values()
    if kind == "rope":
        return {"rope_type": "default", "rope_theta": theta}
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor, **_YARN}
    return {**rope, "mscale": mscale, "mscale_all_dim": all_dim}
