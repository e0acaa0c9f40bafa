"""What all dense Llama-like families share: configuration, layers and weight map.

A family file adds the facts in which its models differ. This file knows no family by name and no
ranks: `weights.shard` cuts the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn.functional import silu

from mrlhf.errors import ConfigError
from mrlhf.models.families.base import Chunk, Family
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.weights.shard import Rule, Shape

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

_EMBEDDING = "model.embed_tokens.weight"
_LANGUAGE_HEAD = "lm_head.weight"
_SCALAR_HEAD = "score.weight"
_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def dense_family(
    model_type: str, class_stem: str, read_config: Callable[[dict[str, Any], Head], ModelSpec]
) -> Family:
    """A family whose models differ from Llama in their `config.json` only."""
    return Family(
        model_type=model_type,
        class_stem=class_stem,
        embedding=_EMBEDDING,
        language_head=_LANGUAGE_HEAD,
        scalar_head=_SCALAR_HEAD,
        required_keys=_REQUIRED_KEYS,
        read_config=read_config,
        megatron_options=megatron_options,
        decoder_spec=decoder_spec,
        tensor_shapes=tensor_shapes,
        parameter_names=parameter_names,
        rule_of=rule_of,
    )


def dense_spec(
    config: dict[str, Any], head: Head, *, qkv_bias: bool, qk_norm: bool, sliding_window: int | None
) -> ModelSpec:
    """The spec of any dense Llama-like `config.json`, given the facts in which families differ.

    Raises:
        ConfigError: the model uses a feature that is not supported, or a number makes no sense.
    """
    if config["hidden_act"] not in ("silu", "swish"):
        raise ConfigError(
            f"config.json has hidden_act={config['hidden_act']!r}; only silu is supported"
        )

    for key in (*_REQUIRED_KEYS, "max_position_embeddings"):
        if config[key] < 1:
            raise ConfigError(f"config.json has {key}={config[key]}; it must be at least 1")

    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: {num_heads} attention heads are not divisible by {num_kv_heads} KV heads"
        )
    if head_dim < 1:
        raise ConfigError(f"config.json gives heads of {head_dim} dimensions; set head_dim")

    rope_theta = config["rope_parameters"]["rope_theta"]
    if not isinstance(rope_theta, int | float):
        raise ConfigError(f"config.json has rope_theta={rope_theta!r}; it must be a number")

    return ModelSpec(
        family=config["model_type"],
        head=head,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config["rms_norm_eps"],
        tied_embeddings=bool(config["tie_word_embeddings"]),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        max_positions=config["max_position_embeddings"],
        rope_theta=float(rope_theta),
        hf_config=config,
    )


def megatron_options(spec: ModelSpec) -> dict[str, Any]:
    """The fields of megatron-core's TransformerConfig that describe the model."""
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "layernorm_epsilon": spec.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        # This also makes finalize_model_grads sum the gradients of these norms over the
        # tensor-parallel group.
        "qk_layernorm": spec.qk_norm,
        # megatron-core does not count the token itself.
        "window_size": None if spec.sliding_window is None else (spec.sliding_window - 1, 0),
    }


def decoder_spec(
    spec: ModelSpec, chunk: Chunk, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """The same layer for every layer of the chunk, and RMSNorm at the end."""
    # Imported here because megatron-core takes seconds to import, and a `config.json` can be read
    # without it.
    from mrlhf.models.layers import uniform_decoder

    return uniform_decoder(
        len(chunk.layers), qk_norm=spec.qk_norm, transformer_engine=transformer_engine
    )


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Hugging Face name and full shape of every tensor of the model, in checkpoint order."""
    hidden = spec.hidden_size
    q_rows = spec.num_heads * spec.head_dim
    kv_rows = spec.num_kv_heads * spec.head_dim

    shapes: dict[str, Shape] = {_EMBEDDING: (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)

        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{attention}{name}_proj.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        if spec.qk_norm:
            shapes[attention + "q_norm.weight"] = (spec.head_dim,)
            shapes[attention + "k_norm.weight"] = (spec.head_dim,)
        shapes[attention + "o_proj.weight"] = (hidden, q_rows)

        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (spec.ffn_size, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (spec.ffn_size, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, spec.ffn_size)

    shapes["model.norm.weight"] = (hidden,)
    if spec.head == "scalar":
        shapes[_SCALAR_HEAD] = (1, hidden)
    elif not spec.tied_embeddings:
        shapes[_LANGUAGE_HEAD] = (spec.vocab_size, hidden)
    return shapes


def parameter_names(spec: ModelSpec, chunk: Chunk) -> list[str]:
    """The names of a chunk's parameters, in the order of `GPTModel.named_parameters()`.

    The last of several chunks has an output layer even where embeddings are tied: a copy of the
    embedding.
    """
    names = []
    if chunk.is_first:
        names.append("embedding.word_embeddings.weight")
    for layer in range(len(chunk.layers)):
        names += [f"decoder.layers.{layer}.{name}" for name in _layer_parameters(spec)]
    if chunk.is_last:
        names.append("decoder.final_layernorm.weight")
        if not (spec.output_is_embedding and chunk.is_first):
            names.append("output_layer.weight")
    return names


def rule_of(spec: ModelSpec, chunk: Chunk, parameter: str) -> Rule:
    """The named tensors that a chunk's parameter holds, and how they are cut.

    Args:
        spec: the model.
        chunk: the part of the model that the parameter belongs to.
        parameter: its name in `GPTModel.named_parameters()`, with the local layer number.
    """
    match = _LAYER.fullmatch(parameter)
    if match is None:
        return _outer_rules(spec)[parameter]
    layer = chunk.layers[int(match[1])]
    return _layer_rules(spec, f"model.layers.{layer}.")[match[2]]


def _layer_parameters(spec: ModelSpec) -> list[str]:
    attention = ["linear_proj.weight", "linear_qkv.weight"]
    if spec.qkv_bias:
        attention.append("linear_qkv.bias")
    if spec.qk_norm:
        attention += ["q_layernorm.weight", "k_layernorm.weight"]

    return [
        "input_layernorm.weight",
        *(f"self_attention.{name}" for name in attention),
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]


def _outer_rules(spec: ModelSpec) -> dict[str, Rule]:
    embedding = Rule((_EMBEDDING,), dim=0)
    if spec.head == "scalar":
        output = Rule((_SCALAR_HEAD,), dim=None)
    elif spec.tied_embeddings:
        output = embedding
    else:
        output = Rule((_LANGUAGE_HEAD,), dim=0)

    return {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": Rule(("model.norm.weight",), dim=None),
        "output_layer.weight": output,
    }


def _layer_rules(spec: ModelSpec, prefix: str) -> dict[str, Rule]:
    attention = prefix + "self_attn."
    mlp = prefix + "mlp."
    input_norm = Rule((prefix + "input_layernorm.weight",), dim=None)
    mlp_norm = Rule((prefix + "post_attention_layernorm.weight",), dim=None)
    gate_and_up = (mlp + "gate_proj.weight", mlp + "up_proj.weight")

    rules = {
        "input_layernorm.weight": input_norm,
        "pre_mlp_layernorm.weight": mlp_norm,
        # TransformerEngine fuses each norm into the linear layer that follows it.
        "self_attention.linear_qkv.layer_norm_weight": input_norm,
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "self_attention.q_layernorm.weight": Rule((attention + "q_norm.weight",), dim=None),
        "self_attention.k_layernorm.weight": Rule((attention + "k_norm.weight",), dim=None),
        "self_attention.linear_proj.weight": Rule((attention + "o_proj.weight",), dim=1),
        "mlp.linear_fc1.weight": Rule(gate_and_up, dim=0),
        "mlp.linear_fc2.weight": Rule((mlp + "down_proj.weight",), dim=1),
    }

    for kind in ("weight", "bias"):
        names = tuple(f"{attention}{letter}_proj.{kind}" for letter in "qkv")
        rules[f"self_attention.linear_qkv.{kind}"] = Rule(names, dim=0, periods=spec.num_kv_heads)
    return rules
