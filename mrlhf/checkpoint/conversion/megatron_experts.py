"""Mixtures of experts under the names of Megatron-LM's command line, and of `config.json`.

`megatron_arguments` knows the rest of the model. Pure: this file knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.checkpoint.conversion.megatron_indexers import INDEXER_FAMILIES, family_of_latents
from mrlhf.errors import CheckpointError
from mrlhf.models.spec import Experts, ModelSpec

# The families with mixtures that Megatron-LM's arguments can describe.
LATENT_FAMILIES = ("deepseek_v3", "glm4_moe_lite", *INDEXER_FAMILIES)
MIXTURE_FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", *LATENT_FAMILIES),
    *("qwen3_next", "qwen3_5_moe_text"),
)

# Megatron-LM's default if an argument is not stated, and the value that all our families need.
ROUTER_NEEDS: dict[str, tuple[Any, Any]] = {
    "moe_router_topk_limited_devices": (None, None),
    "moe_apply_probs_on_input": (False, False),
    "moe_expert_capacity_factor": (None, None),
    "moe_latent_size": (None, None),
}

# Megatron-LM's default if an argument is not stated.
_DEFAULTS: dict[str, Any] = {
    "num_experts": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
}


def expert_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe the mixtures of a model, which may be dense."""
    experts = spec.experts
    if experts is None:
        return {"num_experts": None}

    has_groups = experts.groups > 1
    return {
        "num_experts": experts.count,
        # A list of ones would mean the same, but Megatron-LM would look for layers one by one.
        "moe_layer_freq": 1 if all(experts.layers) else [int(sparse) for sparse in experts.layers],
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.per_token,
        "moe_router_score_function": experts.scoring,
        # The softmax over the chosen experts alone is that over all, divided by their sum.
        "moe_router_pre_softmax": experts.scoring == "softmax" and not experts.normalised,
        "moe_router_topk_scaling_factor": None if experts.scale == 1.0 else experts.scale,
        "moe_router_num_groups": experts.groups if has_groups else None,
        "moe_router_group_topk": experts.groups_per_token if has_groups else None,
        "moe_router_enable_expert_bias": experts.has_correction,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
    }


def stated_experts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's arguments about mixtures, in the form of `expert_arguments`."""
    stated = {name: arguments.get(name, default) for name, default in _DEFAULTS.items()}
    if stated["num_experts"] is None:
        return {"num_experts": None}

    num_layers = arguments.get("num_layers") or 0
    layers = layers_with_experts(stated["moe_layer_freq"], num_layers)
    stated["moe_layer_freq"] = 1 if layers == [1] * num_layers else layers
    if stated["moe_ffn_hidden_size"] is None:
        stated["moe_ffn_hidden_size"] = arguments.get("ffn_hidden_size")
    if stated["moe_router_score_function"] == "sigmoid":
        stated["moe_router_pre_softmax"] = False  # there is no softmax
    if stated["moe_router_topk_scaling_factor"] == 1:
        stated["moe_router_topk_scaling_factor"] = None
    groups = (stated["moe_router_num_groups"], stated["moe_router_group_topk"])
    if None in groups or groups == (1, 1):
        stated["moe_router_num_groups"] = stated["moe_router_group_topk"] = None
    return stated


def contradictions(spec: ModelSpec, arguments: Mapping[str, Any]) -> list[str]:
    """The contradictions between a checkpoint's stated arguments and the model's mixtures."""
    if "num_experts" not in arguments:
        return []
    found = []
    stated = stated_experts(arguments)
    expected = expert_arguments(spec)
    for name in stated | expected:
        if name in arguments and stated.get(name) != expected.get(name):
            found.append(difference(name, stated.get(name), expected.get(name)))
    balancing = arguments.get("moe_router_load_balancing_type") or ""
    if stated["num_experts"] is not None and "sinkhorn" in balancing:
        found.append("moe_router_load_balancing_type is sinkhorn in the checkpoint, and not there")
    return found


def difference(name: str, stated: object, expected: object) -> str:
    """A contradiction in one argument, in words."""
    return f"{name} is {stated!r} in the checkpoint and {expected!r} there"


def layers_with_experts(frequency: Any, num_layers: int) -> list[int]:
    """For each layer 1 if this `moe_layer_freq` gives it a mixture, else 0."""
    if isinstance(frequency, list):
        return frequency
    if not isinstance(frequency, int) or frequency < 1:
        raise CheckpointError(
            f"the checkpoint's moe_layer_freq is {frequency!r}; it must be a positive integer, or "
            "a list of 0 and 1"
        )
    return [int(layer % frequency == 0) for layer in range(num_layers)]


def beyond_router(experts: Experts) -> dict[str, bool]:
    """Features, in words, that Megatron-LM's router lacks, and whether the mixtures have them."""
    is_sigmoid = experts.scoring == "sigmoid"
    is_one = experts.per_token == 1
    return {
        "weights of experts that are not divided by their sum": is_sigmoid
        and not experts.normalised
        and not is_one,
        "one expert a token, whose weight is always the same": experts.normalised and is_one,
        # It scores a group by its best moe_router_topk / moe_router_group_topk experts.
        "groups that are chosen by their two best experts": experts.groups > 1
        and experts.per_token // experts.groups_per_token != 2,
    }


def family_of_mixtures(arguments: Mapping[str, Any]) -> str:
    """The family that has the most notable feature of a checkpoint's mixtures."""
    stated = stated_experts(arguments)
    if arguments.get("multi_latent_attention"):
        return family_of_latents(arguments)
    if stated["moe_router_score_function"] == "sigmoid":
        return "glm4_moe"
    if stated["moe_shared_expert_intermediate_size"] is not None:
        return "qwen2_moe"
    return "qwen3_moe" if arguments.get("qk_layernorm") else "mixtral"


def expert_config(arguments: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The keys of a `config.json` for the mixtures, in addition to those of a dense model.

    They lack features for which the family has no key. A CheckpointError says that the checkpoint
    has no experts, or that the family always has more.
    """
    stated = stated_experts(arguments)
    if stated["num_experts"] is None:
        raise CheckpointError(f"the checkpoint has no experts, and so is no {family} model")
    width = stated["moe_ffn_hidden_size"]
    config = {"num_experts_per_tok": stated["moe_router_topk"]}
    if family in ("mixtral", "gpt_oss"):
        config |= {"num_local_experts": stated["num_experts"], "intermediate_size": width}
        return config

    num_layers = arguments["num_layers"]
    sparse = layers_with_experts(stated["moe_layer_freq"], num_layers)
    dense = [layer for layer, is_sparse in enumerate(sparse) if not is_sparse]
    shared = stated["moe_shared_expert_intermediate_size"]
    if shared is None and family not in ("mixtral", "qwen3_moe"):
        raise CheckpointError(
            f"the checkpoint's moe_shared_expert_intermediate_size is None; a {family} model has a "
            "shared expert"
        )
    config["moe_intermediate_size"] = width
    if family == "glm4_moe" or family in LATENT_FAMILIES:
        kinds = ["sparse" if is_sparse else "dense" for is_sparse in sparse]
        return config | {
            "n_routed_experts": stated["num_experts"],
            "n_shared_experts": shared // width,
            "first_k_dense_replace": len(dense),
            "norm_topk_prob": stated["moe_router_topk"] > 1,
            "routed_scaling_factor": stated["moe_router_topk_scaling_factor"] or 1.0,
            "n_group": stated["moe_router_num_groups"] or 1,
            "topk_group": stated["moe_router_group_topk"] or 1,
            "attention_bias": bool(arguments.get("add_qkv_bias")),
            "use_qk_norm": bool(arguments.get("qk_layernorm")),
            "num_nextn_predict_layers": 0,
            **({} if family in ("glm4_moe", "deepseek_v3") else {"mlp_layer_types": kinds}),
        }

    config |= {
        "num_experts": stated["num_experts"],
        "norm_topk_prob": not stated["moe_router_pre_softmax"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
    if shared is not None:
        config["shared_expert_intermediate_size"] = shared
    if family == "qwen2_moe":
        config["qkv_bias"] = bool(arguments.get("add_qkv_bias"))
    return config


def expert_options(arguments: Mapping[str, Any]) -> list[str]:
    """The options of `pretrain_gpt.py` that make the mixtures of `expert_arguments`."""
    if arguments["num_experts"] is None:
        return []
    options = ["--moe-router-dtype fp32"]
    for name, default in _DEFAULTS.items():
        value = arguments[name]
        option = f"--{name.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif value != default:
            written = str(value).replace(" ", "")
            options.append(f"{option} {written}")
    return options
