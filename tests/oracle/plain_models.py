"""Tiny models of transformers with random weights, which plain loops train, and how to load them.

They share no code with mrlhf.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.models.features import YARN
from tests.models.mixtures import as_in_files
from tests.oracle.plain_lora import Added, adapt, adapter_of, as_stored, factors_of, save_adapter

SIZES: dict[str, Any] = {
    "vocab_size": 67,  # odd: with tensor parallelism the last rank's shard is padded
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
DEEP = ("olmo2", "qwen2-tied")
MIXTURES = ("qwen2-moe", "qwen3-moe", "qwen3-next", "deepseek-v3", "gpt-oss")
# With four stages, the first one trains nothing.
FROZEN = ("*.self_attn.*", "model.embed_tokens.*", "model.layers.0.*")
MODELS = ("llama", "qwen2-tied", "gemma2", "qwen3", "llama-biases", "olmo2", "phi3", *MIXTURES)


# One operation after the other, as the formulas say.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def critic_of(model: str) -> str:
    """The name of the critic, or reward model, that belongs to a policy."""
    return f"{model}-critic"


def save_models(root: Path, layers: int = SIZES["num_hidden_layers"]) -> None:
    """Write random models: `<model>`, `<model>-ref` not far from it, and its critic.

    Beside model and critic stands an adapter of each.

    Those in `DEEP` have four layers, and the others `layers`.
    """
    generator = torch.Generator().manual_seed(4)
    for name, config in _configs(layers).items():
        config.num_labels = 1

        policy = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
        _randomise(policy, generator)
        policy.save_pretrained(root / name)
        save_adapter(policy, adapter_of(root / name), torch.Generator().manual_seed(13))
        for parameter in policy.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
        policy.save_pretrained(root / f"{name}-ref")

        critic = transformers.AutoModelForSequenceClassification.from_config(config, **EAGER)
        _randomise(critic, generator)
        critic.save_pretrained(root / f"{name}-critic")
        adapter = adapter_of(root / f"{name}-critic")
        save_adapter(critic, adapter, torch.Generator().manual_seed(8))


def save_wide(path: Path) -> None:
    """Write a random model with another number of hidden units than those of `save_models`."""
    config = transformers.LlamaConfig(**(SIZES | {"hidden_size": 48}), tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
    _randomise(model, torch.Generator().manual_seed(11))
    model.save_pretrained(path)


def _configs(layers: int) -> dict[str, Any]:
    """The configuration of each of `MODELS`."""
    deep = {"num_hidden_layers": 4}
    sizes = SIZES | {"num_hidden_layers": layers}
    one_kv_head = SIZES | {"num_key_value_heads": 1}
    dense = {
        "llama": transformers.LlamaConfig(**sizes, tie_word_embeddings=False),
        "llama-biases": transformers.LlamaConfig(
            **sizes,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=YARN,
        ),
        "olmo2": transformers.Olmo2Config(
            **(SIZES | deep), pad_token_id=None, tie_word_embeddings=False
        ),
        "phi3": transformers.Phi3Config(
            **sizes, pad_token_id=None, partial_rotary_factor=0.5, tie_word_embeddings=False
        ),
        "qwen2-tied": transformers.Qwen2Config(**(one_kv_head | deep), tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=False),
    }

    capped = transformers.Gemma2Config(
        **sizes,
        head_dim=10,
        query_pre_attn_scalar=10,
        sliding_window=5,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        pad_token_id=None,
    )
    return dense | _mixtures(sizes) | {"gemma2": capped}


def _mixtures(sizes: dict[str, Any]) -> dict[str, Any]:
    """Of the mixtures of experts; some layers of each but the last are dense."""
    return {
        "qwen2-moe": transformers.Qwen2MoeConfig(
            **sizes,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        ),
        "qwen3-moe": transformers.Qwen3MoeConfig(
            **sizes,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            norm_topk_prob=False,
            mlp_only_layers=[1],
            tie_word_embeddings=True,
        ),
        "deepseek-v3": transformers.DeepseekV3Config(
            **{**sizes, "num_key_value_heads": 4},
            q_lora_rank=14,
            kv_lora_rank=10,
            qk_nope_head_dim=5,
            qk_rope_head_dim=4,
            v_head_dim=6,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            pad_token_id=None,
            tie_word_embeddings=False,
        ),
        "gpt-oss": transformers.GptOssConfig(
            **sizes,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=5,
            swiglu_limit=0.4,
            rope_parameters=YARN,
            pad_token_id=None,
            tie_word_embeddings=False,
        ),
        "qwen3-next": transformers.Qwen3NextConfig(
            **sizes,
            head_dim=8,
            full_attention_interval=2,
            linear_num_key_heads=8,
            linear_num_value_heads=16,
            linear_key_head_dim=6,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=3,
            rms_norm_eps=1e-3,  # the norm of small outputs of heads would show their rounding
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[0],
            partial_rotary_factor=0.5,
            tie_word_embeddings=False,
        ),
    }


def _randomise(model: Any, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            adds_one = model.config.model_type == "qwen3_next" and ".linear_attn." not in name
            parameter.data = (0 if adds_one else 1) + 0.1 * noise
        else:
            parameter.data = 0.15 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def load(path: Path, adapted: bool = False, freeze: bool = False) -> Any:
    """The checkpoint at `path` as transformers' model; a critic is a sequence classifier.

    If `adapted`, only the adapter beside it is trained, and a critic's head; if `freeze`, all but
    what `FROZEN` matches.
    """
    auto = transformers.AutoModelForCausalLM
    if path.name.endswith("-critic"):
        auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(path, dtype=torch.float32, **EAGER).eval()
    if adapted:
        adapt(model, adapter_of(path))
    if freeze:
        for name, parameter in model.named_parameters():
            if is_frozen(name):
                parameter.requires_grad_(False)
    return model


def is_frozen(name: str) -> bool:
    """Whether a pattern of `FROZEN` matches a tensor."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in FROZEN)


def weights_of(model: Any) -> dict[str, Tensor]:
    """A copy of the model's weights by their names in files, or of its adapter and head."""
    if any(isinstance(module, Added) for module in model.modules()):
        return as_stored(factors_of(model), model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            weights[name] = buffer.clone()
    is_as_in_files = model.config.model_type == "gpt_oss"
    return weights if is_as_in_files else as_in_files(weights, model.config.model_type)
