"""The models that benchmarks measure, by their number of parameters: Llamas, Qwen3s on GPUs."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, Qwen3Config

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "3M": {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    },
    "26M": {
        "vocab_size": 8192,
        "hidden_size": 448,
        "intermediate_size": 1216,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "110M": {
        "vocab_size": 22528,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    # The published shape, with random weights: they do not change the speed.
    "SmolLM2-135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
# "0.6B" and "1.7B" have the published shapes of Qwen3-0.6B and Qwen3-1.7B.
QWEN3: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "0.25B": {
        "vocab_size": 151936, "hidden_size": 768, "intermediate_size": 2304,
        "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "0.6B": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1.7B": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip


def qwen3_config(size: str, **options: Any) -> Qwen3Config:
    """A Qwen3 of this size, with further keys of its configuration."""
    return Qwen3Config(
        **QWEN3[size],
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        **options,
    )


def model_config(size: str) -> LlamaConfig:
    """A Llama-shaped model of this size."""
    return LlamaConfig(
        **{"num_key_value_heads": 4, "tie_word_embeddings": False, **SIZES[size]},
        max_position_embeddings=1024,
    )
