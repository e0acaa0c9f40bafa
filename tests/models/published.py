"""The `config.json` of published models, for checks that need no weights."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import (
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.models.published_files import FILES


def _llama(hidden: int, ffn: int, layers: int, heads: int) -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )


def _qwen3(hidden: int, ffn: int, layers: int, heads: int) -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )


def _configs() -> dict[str, PretrainedConfig]:
    return {
        "Qwen2.5-1.5B": Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
        "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
        "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
        "Qwen3-30B-A3B": Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            max_position_embeddings=40960,
            tie_word_embeddings=False,
        ),
        # Their defaults are the published values.
        "GLM-4.7-Flash": Glm4MoeLiteConfig(),
        "GLM-5": GlmMoeDsaConfig(),
        "DeepSeek-V3.2": DeepseekV32Config(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            }
        ),
        "Llama-3.1-8B-Instruct": _llama(4096, 14336, 32, 32),
        "Llama-3.3-70B-Instruct": _llama(8192, 28672, 80, 64),
    }


def write_published(directory: Path) -> None:
    """Write `directory/<name>/config.json` for each of them."""
    for name, config in _configs().items():
        config.save_pretrained(directory / name)
    for name, stated in FILES.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(stated))
