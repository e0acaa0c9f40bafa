"""Tiny transformers configurations that use the features beyond the first Llama's.

Each family is there, and each feature of one. The sizes are the caller's.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# With every number that may be stated. Together they scale cosines and sines by 1.19 / 1.38.
YARN_IN_FULL = {
    **YARN,
    "factor": 6.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 2.0,
    "truncate": False,
}


def feature_configs(sizes: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    """The configurations by name; `sizes` has an even number of layers, 4 or more."""
    layers = sizes["num_hidden_layers"]
    return {
        "llama-yarn-biases": LlamaConfig(
            **sizes,
            rope_parameters=YARN,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "qwen2-windows": Qwen2Config(
            **sizes, use_sliding_window=True, sliding_window=7, max_window_layers=layers // 2
        ),
        "qwen3-yarn-biases": Qwen3Config(
            **sizes, head_dim=16, rope_parameters=YARN_IN_FULL, attention_bias=True
        ),
        "ministral": MinistralConfig(
            **sizes,
            head_dim=20,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention"] * (layers // 2),
        ),
        "smollm3": SmolLM3Config(
            **sizes,
            no_rope_layers=[1, 0, *[1] * (layers - 3), 0],
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["full_attention"] * (layers - 1) + ["sliding_attention"],
            pad_token_id=None,
        ),
        "seed-oss": SeedOssConfig(
            **sizes,
            head_dim=16,
            attention_bias=False,
            attention_out_bias=True,
            mlp_bias=True,
            attention_dropout=0.0,
            residual_dropout=0.0,
        ),
        "phi3": Phi3Config(
            **sizes,
            partial_rotary_factor=0.5,
            sliding_window=8,
            pad_token_id=None,
            tie_word_embeddings=False,
        ),
        "granite": GraniteConfig(
            **sizes,
            embedding_multiplier=6.0,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            logits_scaling=3.0,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "olmo2": Olmo2Config(**sizes, rope_parameters=YARN, pad_token_id=None),
        "olmo3": Olmo3Config(
            **{**sizes, "num_key_value_heads": sizes["num_attention_heads"]},
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": YARN,
            },
            pad_token_id=None,
        ),
        **_gemma_configs(sizes),
    }


def _gemma_configs(sizes: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    common = {**sizes, "head_dim": 16, "sliding_window": 7, "pad_token_id": None}
    by_turns = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    return {
        "gemma2": Gemma2Config(
            **common,
            query_pre_attn_scalar=3,
            attn_logit_softcapping=0.9,
            final_logit_softcapping=2.5,
        ),
        "gemma3": Gemma3TextConfig(
            **common,
            query_pre_attn_scalar=20,
            final_logit_softcapping=4.0,
            layer_types=by_turns,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
            },
        ),
        "gemma4": gemma4_config(sizes),
        # The keys of the first layer are no other's.
        "gemma4-linked": gemma4_config(
            sizes | {"num_hidden_layers": 5},
            layer_types=["sliding_attention", *by_turns[:4]],
            num_global_key_value_heads=None,
            attention_k_eq_v=False,
            hidden_size_per_layer_input=10,
            vocab_size_per_layer_input=sizes["vocab_size"],
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
        ),
    }


def gemma4_config(sizes: dict[str, Any], **more: Any) -> PreTrainedConfig:
    """A Gemma 4 whose layers have a window by turns, but not the last."""
    layers = sizes["num_hidden_layers"]
    full = [number % 2 == 1 or number == layers - 1 for number in range(layers)]
    own: dict[str, Any] = {
        "head_dim": 16,
        "sliding_window": 7,
        "pad_token_id": None,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 4.0,
        "layer_types": ["full_attention" if is_full else "sliding_attention" for is_full in full],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 20000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    }
    return Gemma4TextConfig(**{**sizes, **own, **more})


FEATURE_MODELS = (
    "llama-yarn-biases",
    "qwen2-windows",
    "qwen3-yarn-biases",
    "ministral",
    "smollm3",
    "seed-oss",
    "phi3",
    "granite",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-linked",
)
