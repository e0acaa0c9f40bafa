"""Tiny Hugging Face models on disk, for the tests of conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from mrlhf.checkpoint.conversion.convert import Format, SourceOptions, TargetOptions, convert

_SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LATENT: dict[str, Any] = {
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_INDEXER = {"q_lora_rank": 10, "index_n_heads": 3, "index_head_dim": 9, "index_topk": 3}
_DELTA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied-llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3,
        "head_dim": 16,
        "max_position_embeddings": 16384,
    },
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": None},
    "mistral-tied-window": {
        "model_type": "mistral",
        "tie_word_embeddings": True,
        "sliding_window": 6,
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 6},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 6},
    "mixtral": {
        "model_type": "mixtral",
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "norm_topk_prob": False,
    },
    "qwen3_moe-tied": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": True,
        "head_dim": 6,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "tie_word_embeddings": False,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "tie_word_embeddings": False,
        "head_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
        "swiglu_limit": 0.7,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "q_lora_rank": 10,
        "rope_parameters": _YARN,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "q_lora_rank": None,
    },
    "deepseek_v32": {
        **_LATENT,
        **_INDEXER,
        "model_type": "deepseek_v32",
        "mlp_layer_types": ["sparse"] * 4,
        "rope_parameters": _YARN,
    },
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEXER,
        "model_type": "glm_moe_dsa",
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "qwen3_next": {
        **_DELTA,
        "model_type": "qwen3_next",
        "tie_word_embeddings": False,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        "mlp_only_layers": [1],
    },
    "qwen3_5_text-tied": {
        **{key: value for key, value in _DELTA.items() if "expert" not in key},
        "model_type": "qwen3_5_text",
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "qwen3_5_moe_text": {
        **_DELTA,
        "model_type": "qwen3_5_moe_text",
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}
"""Every family that Megatron-LM has, with tied and untied embeddings."""


def save_model(
    name: str,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    scalar: bool = False,
    **changes: Any,
) -> None:
    """Save a model with random weights, norms and biases among them, as transformers does."""
    options = {**_SIZES, **CONFIGS[name], **changes}
    if scalar:
        options |= {"num_labels": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(**options)
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM

    generator = torch.Generator().manual_seed(7)
    model = auto.from_config(config)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * values + (1.0 if parameter.dim() == 1 else 0.0)
        if name.endswith("A_log"):
            parameter.data -= 3.0  # else no token would see an earlier one
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.to(dtype).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")


def convert_quietly(
    source: Path, target: Path, form: Format = "huggingface", **given: Any
) -> list[str]:
    """Convert and verify, with these options of the source; returns what was left out."""
    options = (SourceOptions(**given), TargetOptions(form))
    report = convert(source, target, *options, verify=True, start=lambda *_: lambda done: None)
    return report.left_out


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor in a directory's safetensors files."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(first: Path, second: Path) -> None:
    """The same names, dtypes and bits."""
    wanted = read_tensors(first)
    found = read_tensors(second)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
