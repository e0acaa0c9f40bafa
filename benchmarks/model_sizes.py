"""The Llama-shaped models that the benchmarks measure, by their number of parameters."""

from __future__ import annotations

from transformers import LlamaConfig

SIZES: dict[str, dict[str, int]] = {
    "one layer": {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
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
}


def model_config(size: str) -> LlamaConfig:
    """A Llama-shaped model of this size."""
    return LlamaConfig(
        **{"num_key_value_heads": 4, **SIZES[size]},
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
