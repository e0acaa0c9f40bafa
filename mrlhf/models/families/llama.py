"""Llama: how `config.json` becomes a ModelSpec, and which named tensors each Megatron parameter
holds.

The other dense families differ in a few facts and build on these functions. It knows no ranks:
`weights.shard` cuts.
"""

from __future__ import annotations

import re
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.weights.shard import Rule, Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a Llama `config.json` (`config` as transformers fills it in, all defaults
    present).

    Raises:
        ConfigError: the model uses a feature that has no counterpart here.
    """
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigError(
            "config.json sets attention_bias or mlp_bias: biases on o_proj and the MLP are not supported"
        )
    return dense_spec(config, head, qkv_bias=False, qk_norm=False, sliding_window=None)


def dense_spec(
    config: dict[str, Any], head: Head, *, qkv_bias: bool, qk_norm: bool, sliding_window: int | None
) -> ModelSpec:
    """The spec of any dense Llama-like `config.json`, given the facts in which families differ."""
    if config["hidden_act"] not in ("silu", "swish"):
        raise ConfigError(
            f"config.json has hidden_act={config['hidden_act']!r}; only silu is supported"
        )
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: {num_heads} attention heads are not divisible by {num_kv_heads} KV heads"
        )
    return ModelSpec(
        family=config["model_type"],
        head=head,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        norm_eps=config["rms_norm_eps"],
        tied_embeddings=bool(config["tie_word_embeddings"]),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        max_positions=config["max_position_embeddings"],
        rope_theta=float(config["rope_parameters"]["rope_theta"]),
        hf_config=config,
    )


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Hugging Face name and full shape of every tensor of the model, in checkpoint order."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{attention}{name}_proj.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        if spec.qk_norm:
            shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (
                spec.head_dim,
            )
        shapes[attention + "o_proj.weight"] = (hidden, q_rows)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (
            ffn,
            hidden,
        )
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if spec.head == "scalar":
        shapes["score.weight"] = (1, hidden)
    elif not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def rule_of(spec: ModelSpec, parameter: str, layer_offset: int) -> Rule:
    """The rule of a Megatron parameter, named as in one pipeline stage.

    Args:
        spec: the model.
        parameter: its name in `GPTModel.named_parameters()`, with the local layer number.
        layer_offset: global number of the stage's first layer.
    """
    match = _LAYER.fullmatch(parameter)
    if match is None:
        return _outer_rules(spec)[parameter]
    return _layer_rules(spec, f"model.layers.{int(match[1]) + layer_offset}.")[match[2]]


def _outer_rules(spec: ModelSpec) -> dict[str, Rule]:
    embedding = Rule(("model.embed_tokens.weight",), dim=0)
    if spec.head == "scalar":
        output = Rule(("score.weight",), dim=None)
    else:
        output = embedding if spec.tied_embeddings else Rule(("lm_head.weight",), dim=0)
    return {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": Rule(("model.norm.weight",), dim=None),
        "output_layer.weight": output,
    }


def _layer_rules(spec: ModelSpec, prefix: str) -> dict[str, Rule]:
    attention, groups = prefix + "self_attn.", spec.num_kv_heads
    input_norm = Rule((prefix + "input_layernorm.weight",), dim=None)
    mlp_norm = Rule((prefix + "post_attention_layernorm.weight",), dim=None)
    rules = {
        "input_layernorm.weight": input_norm,
        "pre_mlp_layernorm.weight": mlp_norm,
        # TransformerEngine fuses each norm into the linear layer that follows it.
        "self_attention.linear_qkv.layer_norm_weight": input_norm,
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "self_attention.q_layernorm.weight": Rule((attention + "q_norm.weight",), dim=None),
        "self_attention.k_layernorm.weight": Rule((attention + "k_norm.weight",), dim=None),
        "self_attention.linear_proj.weight": Rule((attention + "o_proj.weight",), dim=1),
        "mlp.linear_fc1.weight": Rule(
            (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"), dim=0
        ),
        "mlp.linear_fc2.weight": Rule((prefix + "mlp.down_proj.weight",), dim=1),
    }
    for kind in ("weight", "bias"):
        names = (
            f"{attention}q_proj.{kind}",
            f"{attention}k_proj.{kind}",
            f"{attention}v_proj.{kind}",
        )
        rules[f"self_attention.linear_qkv.{kind}"] = Rule(names, dim=0, periods=groups)
    return rules
