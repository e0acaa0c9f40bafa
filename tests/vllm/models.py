"""Tiny models that vLLM has attention for on a CPU, and what transformers says about a response."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import transformers

from mrlhf.inference.base import Sample
from tests.models.engines import random_model

_FOUND = importlib.util.find_spec(
    "vllm"
)  # this folder may be found under that name, but has no origin
needs_vllm = pytest.mark.skipif(
    _FOUND is None or _FOUND.origin is None, reason="vLLM is not installed: make vllm"
)

VOCABULARY = 131  # vLLM pads it to 192
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
# vLLM pads experts of a width that is no multiple of 32.
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _gemma4_config(**more: Any) -> transformers.PreTrainedConfig:
    return transformers.Gemma4TextConfig(
        **SIZES,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
        final_logit_softcapping=4.0,
        pad_token_id=None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 20000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        **more,
    )


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": lambda: transformers.Qwen2Config(
        **{**SIZES, "hidden_size": 128}, tie_word_embeddings=True
    ),
    "qwen2-tied-whole": lambda: transformers.Qwen2Config(
        **{**SIZES, "hidden_size": 128, "vocab_size": 192}, tie_word_embeddings=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=False),
    "mistral-window": lambda: transformers.MistralConfig(
        **SIZES, tie_word_embeddings=False, sliding_window=6
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        query_pre_attn_scalar=3,
        sliding_window=6,
        attn_logit_softcapping=0.9,
        final_logit_softcapping=2.5,
        pad_token_id=None,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        query_pre_attn_scalar=24,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4": _gemma4_config,
    "gemma4-moe": lambda: _gemma4_config(
        enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=6, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **{name: size for name, size in SIZES.items() if name not in ("head_dim", "hidden_size")},
        hidden_size=128,
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **SIZES,
        **EXPERTS,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        pad_token_id=None,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **{**SIZES, "intermediate_size": 128},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 15000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
}


def hf_model(name: str, seed: int = 0) -> Any:
    """The model `name` with random float32 weights, the same in every process."""
    return random_model(CONFIGS[name](), seed)


@torch.no_grad()
def hf_greedy(
    model: Any,
    prompts: list[list[int]],
    max_tokens: int,
    end: list[int] | None = None,
    never: list[int] | None = None,
) -> list[list[int]]:
    """What transformers generates, up to a token of `end`, without those of `never`."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=end,
            suppress_tokens=never,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@torch.no_grad()
def hf_difference(
    model: Any, prompts: list[list[int]], samples: list[Sample], temperature: float = 1.0
) -> float:
    """The largest difference between the samples' log-probs and those of one forward pass."""
    worst = 0.0
    for sample in samples:
        prompt = prompts[sample.request_id]
        logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1]
        wanted = (
            (logits / temperature)
            .log_softmax(-1)
            .gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        )
        assert len(sample.logprobs) == len(sample.token_ids)
        worst = max(worst, float((wanted - torch.tensor(sample.logprobs)).abs().max()))
    return worst


def make_prompts(count: int = 6, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCABULARY, (length + i,), generator=generator).tolist()
        for i in range(count)
    ]
