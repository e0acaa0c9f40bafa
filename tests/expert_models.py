"""Tiny transformers models with mixtures of experts, and their tensors as checkpoints name them.

Each family is there, with each way of choosing experts, dense layers among the others, shared
experts and shared gates. The sizes are the caller's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

EXPERT_MODELS = ("qwen3-moe", "mixtral", "qwen2-moe", "glm4-moe")


def expert_configs(sizes: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    """The configurations by name; `sizes` has 3 layers or more."""
    return {
        "qwen3-moe": Qwen3MoeConfig(
            **sizes,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            tie_word_embeddings=False,
        ),
        "mixtral": MixtralConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
        ),
        "qwen2-moe": Qwen2MoeConfig(
            **sizes,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=36,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            tie_word_embeddings=True,
        ),
        "glm4-moe": Glm4MoeConfig(
            **sizes,
            head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=28,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            first_k_dense_replace=1,
            use_qk_norm=True,
            tie_word_embeddings=False,
        ),
    }


def file_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of a transformers model under the names that its checkpoints have.

    transformers keeps the experts of a layer in two tensors; checkpoints have three for each.
    """
    layer = ".mlp"
    gate_name, up_name, down_name = "gate_proj", "up_proj", "down_proj"
    if model.config.model_type == "mixtral":
        layer = ".block_sparse_moe"
        gate_name, up_name, down_name = "w1", "w3", "w2"

    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, is_of_experts, kind = name.rpartition(".mlp.experts.")
        if not is_of_experts:
            tensors[name.replace(".mlp.gate.", f"{layer}.gate.")] = tensor
            continue
        for number, weight in enumerate(tensor):
            expert = f"{prefix}{layer}.experts.{number}."
            if kind == "down_proj":
                tensors[f"{expert}{down_name}.weight"] = weight
            else:
                gate, up = weight.chunk(2)
                tensors[f"{expert}{gate_name}.weight"] = gate
                tensors[f"{expert}{up_name}.weight"] = up
    return tensors
