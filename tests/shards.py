"""Tiny models cut by hand: specs, full tensors, and the local parameters of any rank.

Parameters are filled with NaN, so that what a test forgets to fill shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from mrlhf.models.families import FAMILIES, family_of
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.weights.shard import Piece, Shape, Slot

_HYBRID: dict[str, Any] = {
    "head_dim": 4,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 4,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": None,
}
_GEMMA_4: dict[str, Any] = {
    "head_dim": 4,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
}
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama_tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2": {"tie_word_embeddings": False},
    "qwen2_tied": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 6},
    "phi3": {
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 2,
    },
    "olmo2": {"tie_word_embeddings": False, "pad_token_id": None, "num_key_value_heads": 8},
    "gemma4_text": _GEMMA_4,
    # The values that the last layers share are keys in one of two layers.
    "gemma4_text_linked": _GEMMA_4
    | {
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 37,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "qwen3_5_text": {"tie_word_embeddings": True, **_HYBRID, "num_key_value_heads": 2},
    "seed_oss": {"tie_word_embeddings": False, "attention_out_bias": True, "mlp_bias": True},
}
MODELS = tuple(_FAMILY)
_MIXTURE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": _SHARED_EXPERT,
    "glm4_moe": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "head_dim": 4,
        "pad_token_id": None,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 4, "sliding_window": 16},
    "gemma4_moe": {
        **_GEMMA_4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "deepseek_v3": _LATENT,
    "glm_moe_dsa": {
        **_LATENT,
        "index_topk": 2048,
        "index_head_dim": 6,
        "index_n_heads": 3,
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "qwen3_next": {**_HYBRID, **_SHARED_EXPERT},
    "qwen3_5_moe_text": {**_HYBRID, **_SHARED_EXPERT, "linear_num_value_heads": 12},
}
MIXTURES = tuple(_MIXTURE)


def tiny_config(model: str) -> PretrainedConfig:
    """Four layers, eight query heads, four KV heads or fewer, and a vocabulary of 37.

    No tensor-parallel size divides the vocabulary. In the tied models four ranks, and in one of
    them two, share a KV head.
    """
    sizes = {
        "vocab_size": 37,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }

    if model in _MIXTURE:
        sizes |= {"num_experts_per_tok": 2, **_MIXTURE[model]}
        return AutoConfig.for_model(model.replace("gemma4_moe", "gemma4_text"), **sizes)
    model_type = model.removesuffix("_tied").removesuffix("_linked")
    return AutoConfig.for_model(model_type, **(sizes | _FAMILY[model]))


def tiny_spec(model: str, head: Head = "lm") -> ModelSpec:
    config = tiny_config(model).to_dict()
    return FAMILIES[config["model_type"]].read_config(config, head)


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    return family_of(spec).tensor_shapes(spec)


def full_tensors(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random full tensors; no two numbers of a model are likely to be equal."""
    generator = torch.Generator().manual_seed(17)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in tensor_shapes(spec).items()
    }


def make_slots(pieces: Iterable[Piece], dtype: torch.dtype = torch.float32) -> list[Slot]:
    """Local parameters of NaN, as large as the pieces in them say, padding included."""
    pieces = list(pieces)
    parameters: dict[str, Tensor] = {}
    for piece in pieces:
        if piece.parameter not in parameters:
            rows = -(-(piece.stop - piece.start) // piece.block) * piece.period
            shape = (*piece.full_shape[: piece.dim], rows, *piece.full_shape[piece.dim + 1 :])
            parameters[piece.parameter] = torch.full(shape, float("nan"), dtype=dtype)
    return [Slot(piece, parameters[piece.parameter]) for piece in pieces]


def fill(slots: Iterable[Slot], tensors: dict[str, Tensor]) -> None:
    """Store the slices of the full tensors, block by block."""
    for slot in slots:
        piece = slot.piece
        for number, start in enumerate(range(piece.start, piece.stop, piece.block)):
            block = tensors[piece.name].narrow(piece.dim, start, piece.block)
            slot.parameter.narrow(
                piece.dim, number * piece.period + piece.offset, piece.block
            ).copy_(block)


def stored(slot: Slot) -> Tensor:
    """The named slice that a slot holds, read block by block."""
    piece = slot.piece
    starts = range(piece.offset, slot.parameter.shape[piece.dim], piece.period)
    blocks = [slot.parameter.narrow(piece.dim, start, piece.block) for start in starts]
    return torch.cat(blocks, dim=piece.dim)
