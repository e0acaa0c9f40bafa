"""Configuration and layers that all Llama-like families share.

A family file adds the facts in which its models differ; `mixture` adds those that models with
experts share. This file knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.nn.functional import silu

from mrlhf.errors import ConfigError
from mrlhf.models.families.base import Chunk, Family
from mrlhf.models.families.dense_weights import (
    EMBEDDING,
    LANGUAGE_HEAD,
    SCALAR_HEAD,
    rules_of,
    tensor_shapes,
)
from mrlhf.models.rope import check_rope, rope_of
from mrlhf.models.spec import WHOLE_MODEL, Head, ModelSpec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def dense_family(
    model_type: str, class_stem: str, read_config: Callable[[dict[str, Any], Head], ModelSpec]
) -> Family:
    """A family whose models differ from Llama in the features that a `ModelSpec` states."""
    return Family(
        model_type=model_type,
        class_stem=class_stem,
        embedding=EMBEDDING,
        language_head=LANGUAGE_HEAD,
        scalar_head=SCALAR_HEAD,
        required_keys=REQUIRED_KEYS,
        read_config=read_config,
        megatron_options=megatron_options,
        decoder_spec=decoder_spec,
        base_shapes=tensor_shapes,
        base_rules=rules_of,
    )


def dense_spec(config: dict[str, Any], head: Head, partial_rotary: bool = False) -> ModelSpec:
    """The spec of a `config.json` of a model with the features of the first Llama.

    A family replaces the fields in which its models differ. `config` is the `config.json` as
    transformers completes it; `partial_rotary` says whether the family rotates
    `partial_rotary_factor` of each head.

    Raises:
        ConfigError: the model uses a feature that is not supported, or a number makes no sense.
    """
    if config["hidden_act"] not in ("silu", "swish"):
        raise ConfigError(
            f"config.json has hidden_act={config['hidden_act']!r}; only silu is supported"
        )

    for key in (*REQUIRED_KEYS, "max_position_embeddings"):
        if config[key] < 1:
            raise ConfigError(f"config.json has {key}={config[key]}; it must be at least 1")
    _check_completed(config)

    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: {num_heads} attention heads are not divisible by {num_kv_heads} KV heads"
        )
    if head_dim < 1:
        raise ConfigError(f"config.json gives heads of {head_dim} dimensions; set head_dim")

    rope = config["rope_parameters"]
    check_rope(rope, partial_rotary)
    layers = config["num_hidden_layers"]
    spec = ModelSpec(
        family=config["model_type"],
        head=head,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config["rms_norm_eps"],
        tied_embeddings=bool(config["tie_word_embeddings"]),
        max_positions=config["max_position_embeddings"],
        rope_theta=float(rope["rope_theta"]),
        hf_config=config,
        windows=(None,) * layers,
        ropes=(WHOLE_MODEL,) * layers,
        rotary_dim=rotary_dim(rope, head_dim) if partial_rotary else head_dim,
    )
    check_rotations(spec)
    return spec


def require_values(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Refuse other values of keys that transformers does not know: it computes these."""
    for key, only in values.items():
        if config.get(key, only) != only:
            raise ConfigError(
                f"config.json has {key}={config[key]!r}; only {only!r} is supported in a "
                f"{config['model_type']} model"
            )


def refuse_scalar(config: dict[str, Any], head: Head, class_stem: str) -> None:
    """Refuse a critic or reward model of a family without a classifier in transformers."""
    if head == "scalar":
        raise ConfigError(
            f"a critic or reward model cannot be a {config['model_type']} model, because "
            f"transformers has no {class_stem}ForSequenceClassification; use a model of another "
            "family"
        )


def with_layer_types(spec: ModelSpec) -> ModelSpec:
    """The model with the windows of `layer_types`; ConfigError if these are wrong."""
    types = spec.hf_config["layer_types"]
    window = spec.hf_config["sliding_window"]

    for layer_type in types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"config.json has layer_types with {layer_type!r}; only full_attention and "
                f"sliding_attention are supported"
            )
    if len(types) != spec.num_layers:
        raise ConfigError(
            f"config.json has {len(types)} layer_types and num_hidden_layers={spec.num_layers}; "
            f"give one for each layer"
        )
    if not window and "sliding_attention" in types:
        raise ConfigError(
            "config.json has layers of sliding_attention and no sliding_window; set it"
        )

    return replace(
        spec, windows=tuple(window if kind == "sliding_attention" else None for kind in types)
    )


def read_by_layer_type(
    config: dict[str, Any], head: Head, read_uniform: Callable[[dict[str, Any], Head], ModelSpec]
) -> ModelSpec:
    """The spec of a `config.json` whose `layer_types` say how each layer rotates and what it sees.

    `read_uniform` reads it as that of a model whose layers all rotate alike.
    """
    by_type = config["rope_parameters"]
    for layer_type in ("full_attention", "sliding_attention"):
        check_rope(by_type[layer_type], partial=False)
    plain = {"rope_type": "default", "rope_theta": by_type["full_attention"]["rope_theta"]}

    uniform = read_uniform({**config, "rope_parameters": plain}, head)
    spec = with_layer_types(replace(uniform, hf_config=config))
    spec = replace(spec, ropes=tuple(config["layer_types"]))
    check_rotations(spec)
    return spec


def with_window(spec: ModelSpec) -> ModelSpec:
    """The model with `sliding_window` on every layer; ConfigError if no token sees another."""
    window = spec.hf_config.get("sliding_window")
    if window == 0:
        raise ConfigError("config.json has sliding_window=0; set it to null for no window")
    return replace(spec, windows=(window,) * spec.num_layers)


def check_rotations(spec: ModelSpec) -> None:
    """Raise a ConfigError for rotary parameters with which transformers cannot compute."""
    for kind in {kind for kind in spec.ropes if kind is not None}:
        try:
            rope = rope_of(spec, kind)
        except KeyError as error:
            raise ConfigError(f"config.json: rope_parameters has no {error.args[0]}") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(
                f"config.json: rope_parameters cannot be computed with: {error}"
            ) from error
        if not bool(rope.frequencies.isfinite().all()):
            raise ConfigError(
                "config.json: the rope parameters give frequencies that are not finite"
            )


def megatron_options(spec: ModelSpec) -> dict[str, Any]:
    """The fields of megatron-core's TransformerConfig that describe the model."""
    options = {
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
        # `layers` gives biases to the linear layers that have them, each by itself.
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        # This also makes finalize_model_grads sum the gradients of these norms over the
        # tensor-parallel group, which is wrong where each rank has weights of its own.
        "qk_layernorm": spec.qk_norm == "head",
        "softmax_scale": spec.attention_multiplier,
        "attention_output_gate": spec.output_gate,
    }

    window = spec.sliding_window
    if window is not None:
        options["window_size"] = (window - 1, 0)  # megatron-core does not count the token itself
        options["window_attn_skip_freq"] = [int(size is not None) for size in spec.windows]
    return options


def decoder_spec(
    spec: ModelSpec, chunk: Chunk, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """The layers of the chunk, and RMSNorm at the end."""
    # Imported here because megatron-core takes seconds to import, and a `config.json` can be read
    # without it.
    from mrlhf.models.layers import decoder

    return decoder(spec, chunk.layers, transformer_engine)


def _check_completed(config: dict[str, Any]) -> None:
    """Raise a ConfigError for a model that transformers completes, and then cannot build."""
    if "head_dim" in config and config["head_dim"] is None:
        raise ConfigError(
            "config.json states no head_dim, without which transformers cannot build the model; "
            "set it, for most models to hidden_size / num_attention_heads"
        )

    pad = config.get("pad_token_id")
    if pad is not None and pad >= config["vocab_size"]:
        raise ConfigError(
            f"config.json states no pad_token_id, and the {pad} that transformers takes then is "
            f"not below vocab_size {config['vocab_size']}; set it to a token, or to null"
        )


def rotary_dim(rope: dict[str, Any], head_dim: int) -> int:
    """The dimensions of a head that are rotated; ConfigError if none or not even."""
    factor = rope.get("partial_rotary_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ConfigError(
            f"config.json has partial_rotary_factor={factor!r}; it must be above 0 and at most 1"
        )
    rotated = int(head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise ConfigError(
            f"config.json has partial_rotary_factor={factor!r}, which rotates {rotated} of "
            f"{head_dim} dimensions of a head; the number must be even"
        )
    return rotated
