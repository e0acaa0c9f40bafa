"""The parts of their configuration that families with mixtures of experts share.

A family file says which keys mean what. This file knows no family by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.base import Family
from mrlhf.models.families.dense import REQUIRED_KEYS, dense_family
from mrlhf.models.families.dense_weights import rules_of, tensor_shapes
from mrlhf.models.families.expert_weights import (
    CORRECTION,
    ExpertNames,
    forms_in_memory,
    stacked_forms,
)
from mrlhf.models.spec import Experts, Head, ModelSpec
from mrlhf.weights.forms import OtherForm

_MOST_EXPERTS = 4096
SHARED_EXPERT_KEYS = (
    *("num_experts or num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
"""What a `config.json` must state for `with_shared_expert`."""
GROUPED_KEYS = (
    "n_routed_experts or num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
"""The same for `grouped_experts`."""


def mixture_family(
    model_type: str,
    class_stem: str,
    read_config: Callable[[dict[str, Any], Head], ModelSpec],
    names: ExpertNames,
    required_keys: tuple[str, ...],
) -> Family:
    """A Llama-like family with mixtures, whose `config.json` must state `required_keys`."""
    return replace(
        dense_family(model_type, class_stem, read_config),
        required_keys=(*REQUIRED_KEYS, *required_keys),
        base_shapes=partial(tensor_shapes, names=names),
        base_rules=partial(rules_of, names=names),
        other_forms=partial(_other_forms, names=names),
    )


def grouped_family(
    model_type: str,
    class_stem: str,
    read_config: Callable[[dict[str, Any], Head], ModelSpec],
    required_keys: tuple[str, ...] = GROUPED_KEYS,
) -> Family:
    """A family with the mixtures of `grouped_experts`, and tensors as those of DeepSeek-V3."""
    names = ExpertNames(shared="mlp.shared_experts")
    return replace(
        mixture_family(model_type, class_stem, read_config, names, required_keys),
        ignored_prefixes=draft_layers,
        float32_endings=(CORRECTION,),
    )


def stacked_experts(
    spec: ModelSpec, names: ExpertNames, in_mxfp4: tuple[bool, ...] = (False,)
) -> dict[str, OtherForm]:
    """The stacks of the experts of all layers, in each of these forms; see `stacked_forms`."""
    forms: dict[str, OtherForm] = {}
    for layer in range(spec.num_layers):
        for packs in in_mxfp4 if spec.has_experts(layer) else ():
            forms.update(stacked_forms(spec, names, f"model.layers.{layer}.", packs))
    return forms


def _other_forms(spec: ModelSpec, names: ExpertNames) -> dict[str, OtherForm]:
    """The tensors in which a file may hold the mixtures of all layers."""
    forms: dict[str, OtherForm] = {}
    for layer in range(spec.num_layers):
        if spec.has_experts(layer):
            forms.update(forms_in_memory(spec, names, f"model.layers.{layer}."))
    return forms


def with_experts(spec: ModelSpec, experts: Experts) -> ModelSpec:
    """The model with these mixtures, dense if no layer has one; ConfigError if they do not fit."""
    if not any(experts.layers):
        return spec
    if experts.per_token > experts.count:
        raise ConfigError(
            f"config.json has num_experts_per_tok={experts.per_token} of {experts.count} experts; "
            "a token goes to each expert at most once"
        )

    if experts.count % experts.groups or experts.groups_per_token > experts.groups:
        raise ConfigError(
            f"config.json has {experts.groups} groups of {experts.count} experts, of which a token "
            f"takes {experts.groups_per_token}; the groups must divide the experts "
            "and be no fewer than those"
        )
    in_groups = experts.count // experts.groups * experts.groups_per_token
    if experts.groups > 1 and (experts.count < 2 * experts.groups or in_groups < experts.per_token):
        raise ConfigError(
            f"config.json has {experts.groups} groups of {experts.count // experts.groups} "
            f"experts, of which a token takes {experts.groups_per_token}; a group needs 2 experts, "
            f"and they together num_experts_per_tok={experts.per_token}"
        )
    return replace(spec, experts=experts)


def with_shared_expert(spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
    """The model with the mixtures of `stated_experts`, and a gated shared expert in each."""
    experts = replace(
        stated_experts(config),
        shared_ffn_size=count(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return with_experts(spec, experts)


def stated_experts(config: dict[str, Any]) -> Experts:
    """The mixtures of a `config.json` with the keys of Qwen's; none has a shared expert."""
    step = count(config, "decoder_sparse_step")
    dense = config["mlp_only_layers"] or ()
    layers = range(config["num_hidden_layers"])
    return Experts(
        count=count(config, "num_experts", "num_local_experts", least=2),
        per_token=count(config, "num_experts_per_tok"),
        ffn_size=count(config, "moe_intermediate_size"),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in layers),
        normalised=bool(config["norm_topk_prob"]),
    )


def grouped_experts(config: dict[str, Any]) -> Experts:
    """The mixtures of a `config.json` with the keys of DeepSeek-V3's, after the dense layers."""
    scale = config["routed_scaling_factor"]
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not 0 < scale < math.inf:
        raise ConfigError(
            f"config.json has routed_scaling_factor={scale!r}; it must be a number above 0"
        )

    first = count(config, "first_k_dense_replace", least=0)
    ffn_size = count(config, "moe_intermediate_size")
    return Experts(
        count=count(config, "n_routed_experts", "num_local_experts", least=2),
        per_token=count(config, "num_experts_per_tok"),
        ffn_size=ffn_size,
        layers=tuple(layer >= first for layer in range(config["num_hidden_layers"])),
        scoring="sigmoid",
        normalised=bool(config["norm_topk_prob"]),
        scale=float(scale),
        groups=count(config, "n_group"),
        groups_per_token=count(config, "topk_group"),
        has_correction=True,
        shared_ffn_size=ffn_size * count(config, "n_shared_experts"),
    )


def draft_layers(spec: ModelSpec) -> tuple[str, ...]:
    """The beginning of the names of the draft model's tensors, which nothing here reads."""
    stated = spec.hf_config.get("num_nextn_predict_layers")
    first = spec.num_layers
    return tuple(f"model.layers.{layer}." for layer in range(first, first + (stated or 0)))


def count(config: dict[str, Any], *names: str, least: int = 1, most: int = _MOST_EXPERTS) -> int:
    """The number under the first of these names in `config.json`; ConfigError if it is wrong."""
    name = next((name for name in names if name in config), names[0])
    value = config[name]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ConfigError(
            f"config.json has {name}={value!r}; it must be an integer from {least} to {most:,}"
        )
    return int(value)
