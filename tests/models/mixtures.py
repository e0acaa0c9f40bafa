"""Tiny transformers configurations of the families with mixtures of experts, or with delta nets.

Each family is there, and each feature of its mixtures. transformers keeps all experts of a layer in
two tensors and writes them to files one by one; so does `as_in_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.models.features import gemma4_config

MIXTURES = (
    *("qwen3-moe", "mixtral", "qwen2-moe", "glm4-moe", "deepseek-v3", "gpt-oss"),
    "gemma4-moe",
)
IN_STACKS = ("gpt_oss", "gemma4_text")
"""The families whose experts transformers writes as they are in memory."""


_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_SHARED = {"num_experts": 8, **_EXPERTS, "shared_expert_intermediate_size": 40}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "pad_token_id": None,
    **_EXPERTS,
}
# Scores are seldom 0, which several keys would share: their order has no rule.
_INDEXER = {"index_topk": 9, "index_head_dim": 10, "index_n_heads": 16}


def mixture_configs(sizes: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    """The configurations by name; `sizes` has 2 layers or more."""
    layers = sizes["num_hidden_layers"]
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    return {
        "qwen3-moe": Qwen3MoeConfig(
            **sizes,
            head_dim=16,
            num_experts=8,
            **_EXPERTS,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            tie_word_embeddings=True,
        ),
        "mixtral": MixtralConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
        ),
        "qwen2-moe": Qwen2MoeConfig(
            **sizes, **_SHARED | {"num_experts": 4, "num_experts_per_tok": 2}, norm_topk_prob=False
        ),
        # With two pipeline stages the first one has no experts.
        "glm4-moe": Glm4MoeConfig(
            **sizes,
            head_dim=16,
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=layers // 2,
            n_shared_experts=2,
            **_GROUPS,
        ),
        # Small limits, so that some of the random numbers are clamped.
        "gpt-oss": GptOssConfig(
            **sizes,
            head_dim=16,
            num_local_experts=8,
            num_experts_per_tok=3,
            sliding_window=7,
            swiglu_alpha=1.3,
            swiglu_limit=0.3,
            rope_parameters=yarn
            | {"rope_theta": 15000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
            | {"truncate": False},
        ),
        "deepseek-v3": deepseek_config(
            sizes,
            q_lora_rank=22,
            rope_parameters=yarn
            | {"rope_theta": 10000.0, "factor": 6.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        ),
        # Queries come from the hidden state, as in Moonlight, and the first layer has experts.
        "glm4-moe-lite": deepseek_config(
            sizes,
            Glm4MoeLiteConfig,
            q_lora_rank=None,
            rope_interleave=False,
            mlp_layer_types=["sparse", "dense", *["sparse"] * (layers - 2)],
        ),
        **_sparse_configs(sizes, yarn),
        "gemma4-moe": gemma4_config(
            sizes,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=24,
        ),
        **_delta_configs(sizes),
    }


def _sparse_configs(sizes: dict[str, Any], yarn: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    """Models whose indexers choose among the tokens of longer sequences."""
    layers = sizes["num_hidden_layers"]
    return {
        "deepseek-v32": deepseek_config(
            sizes,
            DeepseekV32Config,
            q_lora_rank=20,
            **_INDEXER,
            rope_parameters=yarn
            | {"rope_theta": 10000.0, "factor": 6.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        ),
        "glm-moe-dsa": deepseek_config(
            sizes,
            GlmMoeDsaConfig,
            q_lora_rank=22,
            **_INDEXER,
            indexer_types=["full", *["shared", "full"] * layers][:layers],
            mlp_layer_types=["dense", *["sparse"] * (layers - 1)],
        ),
    }


def _delta_configs(sizes: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    """Models with delta nets in all layers but the second, some of them without experts."""
    one_kv_head = sizes | {"num_key_value_heads": 1}  # which two ranks share
    without_ffn = {name: size for name, size in sizes.items() if name != "intermediate_size"}
    layers = range(sizes["num_hidden_layers"])
    net = {
        "head_dim": 16,
        "layer_types": ["full_attention" if n == 1 else "linear_attention" for n in layers],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
    }
    # In text, the sections of a rotation make no difference.
    rope = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return {
        # Half of a head is rotated. Two value heads share a key head.
        "qwen3-next": Qwen3NextConfig(
            **one_kv_head,
            **net,
            **_SHARED,
            partial_rotary_factor=0.5,
            linear_value_head_dim=10,
            tie_word_embeddings=False,
        ),
        # Three value heads share a key head.
        "qwen3-5": Qwen3_5TextConfig(
            **one_kv_head,
            **net | {"linear_num_value_heads": 6},
            rope_parameters=rope,
            linear_value_head_dim=7,
            tie_word_embeddings=True,
        ),
        "qwen3-5-moe": Qwen3_5MoeTextConfig(
            **without_ffn, **net, **_SHARED, partial_rotary_factor=0.25, linear_value_head_dim=9
        ),
    }


def deepseek_config(
    sizes: dict[str, Any], kind: type[PreTrainedConfig] = DeepseekV3Config, **options: Any
) -> PreTrainedConfig:
    """A tiny model with latent attention and odd sizes; norms of latents have another epsilon."""
    if kind is DeepseekV3Config:
        options["first_k_dense_replace"] = 1
    return kind(
        **{**sizes, "num_key_value_heads": sizes["num_attention_heads"]},
        **options,
        rms_norm_eps=1e-3,
        kv_lora_rank=19,
        qk_nope_head_dim=11,
        qk_rope_head_dim=6,
        v_head_dim=9,
        n_shared_experts=1,
        **_GROUPS,
    )


def router_of(layer: Any) -> Any:
    """The router of a layer of a model of transformers."""
    if hasattr(layer, "router"):
        return layer.router
    return layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate


def as_in_files(tensors: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Tensors under the names, and in the parts, in which transformers writes them to files.

    Those of `IN_STACKS`, which it writes as they are in memory, are under the names that we give
    parts.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            named[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if model_type in IN_STACKS:
                is_transposed = model_type == "gpt_oss" and expert.dim() == 2
                named[f"{prefix}.{number}.{last}"] = expert.t() if is_transposed else expert
            elif last == "gate_up_proj":
                gate, up = expert.chunk(2)
                named[f"{prefix}.{number}.gate_proj.weight"] = gate
                named[f"{prefix}.{number}.up_proj.weight"] = up
            else:
                named[f"{prefix}.{number}.down_proj.weight"] = expert

    if model_type != "mixtral":
        return named
    changes = {
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    }
    renamed = {}
    for name, tensor in named.items():
        for old, new in changes.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed
