"""Gemma 4, text alone: as Gemma 3, with other heads in layers without a window, and experts.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import (
    check_rotations,
    read_by_layer_type,
    refuse_scalar,
    rotary_dim,
)
from mrlhf.models.families.expert_weights import ExpertNames
from mrlhf.models.families.gemma2 import gemma_spec
from mrlhf.models.families.mixture import count, mixture_family, stacked_experts
from mrlhf.models.spec import Experts, GlobalHeads, Head, ModelSpec

_NAMES = ExpertNames(
    router="router.proj.weight",
    experts="experts",
    gate="gate_up_proj",
    up=None,
    down="down_proj",
    shared="mlp",
)
_ROPE_TYPES = {
    "sliding_attention": ("default",),
    "full_attention": ("default", "proportional"),
}


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Gemma 4 `config.json`."""
    refuse_scalar(config, head, "Gemma4")
    plain = {
        **config,
        "rope_parameters": _plain_rotations(config),
        "query_pre_attn_scalar": 1,
        "attn_logit_softcapping": None,
    }
    if config["use_bidirectional_attention"] == "vision":  # of tokens of images alone
        plain["use_bidirectional_attention"] = None
    spec = read_by_layer_type(plain, head, gemma_spec)
    spec = replace(
        spec,
        qk_norm="head",
        norm_offset=0.0,
        norms_values=True,
        scales_layers=True,
        global_heads=_global_heads(config),
        key_layers=_key_layers(config),
        borrower_ffn_size=spec.ffn_size * (2 if config["use_double_wide_mlp"] else 1),
        layer_input_size=_layer_input_size(config),
        hf_config=config,
    )
    check_rotations(spec)
    return _with_experts(spec, config) if config["enable_moe_block"] else spec


def _with_experts(spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """The model with experts beside each layer's dense MLP, which all tokens go to."""
    if spec.links_layers:
        raise ConfigError(
            "config.json sets enable_moe_block beside hidden_size_per_layer_input or "
            "num_kv_shared_layers; experts are not supported in such a Gemma 4: use E2B, E4B, "
            "26B-A4B, or the one of 31 billion parameters"
        )
    experts = count(config, "num_experts", least=2)
    return replace(
        spec,
        experts=Experts(
            count=experts,
            per_token=count(config, "top_k_experts", most=experts),
            ffn_size=count(config, "moe_intermediate_size"),
            layers=(True,) * spec.num_layers,
            normalised=True,
            shared_ffn_size=spec.ffn_size,
            activation=spec.activation,
            own_norms=True,
        ),
    )


def _plain_rotations(config: dict[str, Any]) -> dict[str, Any]:
    """The rotations without what is proportional; ConfigError if another type is there."""
    rotations = {}
    for kind, types in _ROPE_TYPES.items():
        rope = config["rope_parameters"][kind]
        if rope["rope_type"] not in types:
            raise ConfigError(
                f"config.json: rope type {rope['rope_type']!r} is not supported in layers of "
                f"{kind} of a Gemma 4; use {' or '.join(types)}"
            )
        rotations[kind] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rotations


def _global_heads(config: dict[str, Any]) -> GlobalHeads:
    """The heads of layers without a window, of which each has an entry of the same numbers."""
    entries = {int(layer): entry for layer, entry in (config.get("per_layer_config") or {}).items()}
    layers = [n for n, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    found = [entries.get(layer, {}) for layer in layers]
    keys = ("head_dim", "num_key_value_heads")
    if entries.keys() - {*layers} or any(
        entry != found[0] or entry.keys() - {*keys} for entry in found
    ):
        raise ConfigError(
            f"config.json has a per_layer_config with others than {' and '.join(keys)}, alike in "
            "all layers of full_attention, and in no others; only these are supported"
        )

    head_dim, kv_heads = (found[0].get(key, config[key]) for key in keys)
    heads = config["num_attention_heads"]
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"config.json: {heads} attention heads are not divisible by the {kv_heads} KV heads of "
            "layers of full_attention"
        )
    rotary_dim(config["rope_parameters"]["full_attention"], head_dim)
    return GlobalHeads(kv_heads, head_dim, keys_are_values=config["attention_k_eq_v"])


def _key_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """For each layer the one whose keys and values it attends to; empty if each has its own."""
    shared = config["num_kv_shared_layers"]
    kinds = config["layer_types"]
    if shared == 0:
        return ()
    own = kinds[: len(kinds) - shared] if 0 < shared < len(kinds) else []
    if not {*kinds} <= {*own}:
        raise ConfigError(
            f"config.json has num_kv_shared_layers={shared}: of {len(kinds)} layers, those before "
            "must be of each kind in layer_types; lower it"
        )
    last = {kind: layer for layer, kind in enumerate(own)}
    return (*range(len(own)), *(last[kind] for kind in kinds[len(own) :]))


def _layer_input_size(config: dict[str, Any]) -> int:
    """Numbers that each layer adds of every token's own."""
    size: int = config["hidden_size_per_layer_input"] or 0
    rows = config["vocab_size_per_layer_input"]
    if size < 0 or (size and rows != config["vocab_size"]):
        raise ConfigError(
            f"config.json has hidden_size_per_layer_input={size} and vocab_size_per_layer_input="
            f"{rows}; the one must be at least 0, and the other vocab_size {config['vocab_size']}"
        )
    return size


def _of_other_parts(spec: ModelSpec) -> tuple[str, ...]:
    """What reads images and sounds; and keys and values that published files hold in vain."""
    borrowers = [layer for layer, own in enumerate(spec.key_layers) if own != layer]
    in_vain = [f"layers.{layer}.self_attn.{part}_" for layer in borrowers for part in "kv"]
    others = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.", *in_vain)
    return tuple(root + part for root in ("model.", "model.language_model.") for part in others)


_MORE_KEYS = (
    *("num_key_value_heads", "head_dim", "sliding_window"),
    "global_head_dim or per_layer_config",
)
GEMMA4 = replace(
    mixture_family("gemma4_text", "Gemma4", read_config, _NAMES, _MORE_KEYS),
    wrapper="gemma4",
    other_forms=partial(stacked_experts, names=_NAMES),
    written_forms=partial(stacked_experts, names=_NAMES),
    ignored_prefixes=_of_other_parts,
)
