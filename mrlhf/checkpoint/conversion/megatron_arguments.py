"""A model's numbers under the names of Megatron-LM's command line, and of `config.json`.

Megatron-LM keeps the arguments of its run in `common.pt`. A model that Hugging Face's families
cannot express is refused, argument by argument. Pure: this file knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.checkpoint.conversion.megatron_delta_nets import (
    DELTA_FAMILIES,
    DELTA_NEEDS,
    DELTA_SIZES,
    delta_arguments,
    delta_config,
    delta_contradictions,
)
from mrlhf.checkpoint.conversion.megatron_experts import (
    LATENT_FAMILIES,
    MIXTURE_FAMILIES,
    ROUTER_NEEDS,
    beyond_router,
    contradictions,
    difference,
    expert_arguments,
    expert_config,
    expert_options,
    family_of_mixtures,
)
from mrlhf.checkpoint.conversion.megatron_gpt_oss import (
    GPT_OSS,
    NEEDS,
    OTHERS_NEED,
    beyond_gpt_oss,
    gpt_oss_arguments,
    gpt_oss_config,
    gpt_oss_options,
    gpt_oss_rope_parameters,
    stated_gpt_oss,
)
from mrlhf.checkpoint.conversion.megatron_indexers import (
    INDEXER_COMPARED,
    INDEXER_FAMILIES,
    INDEXER_VALUES,
    indexer_arguments,
    indexer_config,
    indexer_problems,
)
from mrlhf.checkpoint.conversion.megatron_latents import (
    LATENT_ROPE,
    LATENT_SIZES,
    latent_arguments,
    latent_config,
    latent_rope_arguments,
    latent_rope_parameters,
    stated_latent_rope,
)
from mrlhf.errors import CheckpointError
from mrlhf.models.families import FAMILIES
from mrlhf.models.spec import ModelSpec

# The families that a checkpoint of Megatron-LM alone can be said to be of.
MEGATRON_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", *MIXTURE_FAMILIES)

# Arguments that say how large the model is.
SHAPE_ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "padded_vocab_size", "num_experts"),
)
# Arguments whose values stand in the command line, unless they are None.
_OPTIONS_WITH_VALUES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("linear_attention_freq", *DELTA_SIZES),
    *("seq_length", "max_position_embeddings", "rotary_base", "norm_epsilon"),
    *("make_vocab_size_divisible_by", "rotary_seq_len_interpolation_factor"),
    *(*LATENT_SIZES, *LATENT_ROPE, *INDEXER_VALUES),
)
# Arguments that must be those of the model, if a checkpoint states them.
_COMPARED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *DELTA_SIZES,
    *("rotary_base", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights"),
    *("use_rope_scaling", "rotary_seq_len_interpolation_factor", "rotary_percent"),
    *("multi_latent_attention", *LATENT_SIZES, *INDEXER_COMPARED),
)

# Megatron-LM's default if an argument is not stated, and the value that all our families need.
_NEEDED: dict[str, tuple[Any, Any]] = {
    "swiglu": (False, True),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("learned_absolute", "rope"),
    "add_bias_linear": (True, False),
    "rotary_interleaved": (False, False),
    "apply_layernorm_1p": (False, False),
    "layernorm_zero_centered_gamma": (False, False),
    "apply_residual_connection_post_layernorm": (False, False),
    "qk_l2_norm": (False, False),
    "attention_output_gate": (False, False),
    "mtp_num_layers": (None, None),
    "window_attn_skip_freq": (None, None),
    "no_rope_freq": (None, None),
    "dsa_indexer_scoring_relu": (True, True),
    **OTHERS_NEED,
    **ROUTER_NEEDS,
}

# Llama 3's numbers, which are constants in Megatron-LM's code.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def arguments_of(spec: ModelSpec, vocab_divisible_by: int) -> dict[str, Any]:
    """The arguments of Megatron-LM that describe the model; CheckpointError if none do.

    The number of embedding rows is rounded up to a multiple of `vocab_divisible_by`.
    """
    feature = _beyond_megatron(spec)
    if feature is not None:
        raise CheckpointError(
            f"a {spec.family} model with {feature} cannot be converted to or from Megatron-LM: "
            f"Megatron-LM's arguments do not describe it; keep it as a Hugging Face model"
        )

    latent = spec.latent
    rotary_base = int(spec.rope_theta) if spec.rope_theta.is_integer() else spec.rope_theta
    window = None if spec.sliding_window is None else (spec.sliding_window - 1, 0)
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "group_query_attention": spec.num_kv_heads != spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim if latent is None else latent.value_dim,
        "seq_length": spec.max_positions,
        "max_position_embeddings": spec.max_positions,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": False,
        "add_position_embedding": True,
        "rotary_base": rotary_base,
        "rotary_percent": 1.0 if latent is not None else spec.rotary_dim / spec.head_dim,
        "rotary_interleaved": False,
        **_rope_arguments(spec),
        "window_size": window,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm == "head" or latent is not None,
        "normalization": "RMSNorm",
        "norm_epsilon": spec.norm_eps,
        "layernorm_epsilon": spec.norm_eps,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not spec.tied_embeddings,
        "vocab_size": spec.vocab_size,
        "make_vocab_size_divisible_by": vocab_divisible_by,
        "padded_vocab_size": -(-spec.vocab_size // vocab_divisible_by) * vocab_divisible_by,
        **latent_arguments(spec),
        "experimental_attention_variant": None,
        **indexer_arguments(spec),
        **expert_arguments(spec),
        **(gpt_oss_arguments(spec) if spec.family == GPT_OSS else {}),
        **delta_arguments(spec),
    }


def _beyond_megatron(spec: ModelSpec) -> str | None:
    """A feature of the model, in words, that Megatron-LM's layers or arguments lack, or None."""
    is_gpt_oss = spec.family == GPT_OSS
    features = {
        "gates of attention, and no delta nets": spec.output_gate and spec.delta is None,
        "norms after attention and MLP": spec.norms_after,
        "rotated halves of latents": spec.latent is not None and not spec.latent.interleaved,
        "gates with gelu": spec.activation != "silu",
        "a norm over all heads of q and k": spec.qk_norm == "projection",
        "multipliers of embeddings, residuals, attention or logits": (
            spec.embedding_multiplier,
            spec.residual_multiplier,
            None if spec.latent is not None else spec.attention_multiplier,
            spec.logits_divisor,
        )
        != (1.0, 1.0, None, 1.0),
        "caps of attention or logits": (spec.attention_cap, spec.logits_cap) != (None, None),
        "biases on o_proj or the MLP": (spec.o_bias or spec.mlp_bias) and not is_gpt_oss,
        "q, k and v in one tensor": spec.fused_tensors,
        "layers that do not rotate": any(
            rope is None and not spec.has_delta(layer) for layer, rope in enumerate(spec.ropes)
        ),
        "a window on some layers only": len(set(spec.windows)) > 1 and not is_gpt_oss,
        **(beyond_gpt_oss(spec) if is_gpt_oss else {}),
    }

    if spec.experts is not None:
        features |= beyond_router(spec.experts)
    return next((feature for feature, is_there in features.items() if is_there), None)


def command_line(arguments: Mapping[str, Any]) -> str:
    """The options of `pretrain_gpt.py` that build the model of `arguments_of`, one on each line."""
    is_gpt_oss = arguments["add_bias_linear"]
    options = gpt_oss_options(arguments) if is_gpt_oss else ["--disable-bias-linear", "--swiglu"]
    options += [
        "--normalization RMSNorm",
        "--tokenizer-type HuggingFaceTokenizer",
        "--attention-dropout 0.0",
        "--hidden-dropout 0.0",
    ]
    if arguments["position_embedding_type"] == "rope":
        options.append("--position-embedding-type rope")
    for name in _OPTIONS_WITH_VALUES:
        if arguments.get(name) is not None:
            written = str(arguments[name]).replace(" ", "")
            options.append(f"--{name.replace('_', '-')} {written}")

    if arguments["group_query_attention"]:
        options.append("--group-query-attention")
        options.append(f"--num-query-groups {arguments['num_query_groups']}")
    flags = ["add_qkv_bias", "qk_layernorm", "multi_latent_attention"]
    flags += ["untie_embeddings_and_output_weights", "dsa_indexer_rope_interleaved"]
    for name in flags:
        if arguments.get(name):
            options.append(f"--{name.replace('_', '-')}")
    if arguments["use_rope_scaling"]:
        options.append("--use-rope-scaling")
        options.append(f"--rope-scaling-factor {arguments['rope_scaling_factor']}")
    if "attention_output_gate" in arguments:
        options += ["--attention-output-gate", "--apply-layernorm-1p"]
    if arguments["window_size"] is not None:
        options.append(f"--window-size {','.join(map(str, arguments['window_size']))}")
    if arguments["rotary_percent"] != 1.0:
        options.append(f"--rotary-percent {arguments['rotary_percent']}")
    if arguments["experimental_attention_variant"] == "dsa":
        options += ["--no-dsa-indexer-rotate-activation", "--no-rope-fusion"]
    options += expert_options(arguments)
    return "\n".join(options) + "\n"


def config_of(
    arguments: Mapping[str, Any], vocab_size: int, model_type: str | None
) -> dict[str, Any]:
    """The `config.json` of the model that Megatron-LM's arguments describe.

    The family may lack a key for one of the arguments; `differences` then reports it. `vocab_size`
    counts the rows of the embedding without padding. If `model_type` is None, it is the first
    family that has the model's features.

    Raises:
        CheckpointError: an argument is missing, or no family can express one of them.
    """
    _refuse_unknown(arguments, model_type)
    heads = _stated(arguments, "num_attention_heads")
    hidden = _stated(arguments, "hidden_size")
    # Without grouped queries, num_query_groups is a default that means nothing.
    groups = arguments.get("num_query_groups")
    if not arguments.get("group_query_attention", groups is not None):
        groups = heads
    family = model_type or _family_of(arguments)

    config = {
        "model_type": family,
        "architectures": [FAMILIES[family].class_name("lm")],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _stated(arguments, "ffn_hidden_size"),
        "num_hidden_layers": _stated(arguments, "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": arguments.get("kv_channels") or hidden // heads,
        "max_position_embeddings": _stated(arguments, "max_position_embeddings"),
        "rms_norm_eps": float(_stated(arguments, "norm_epsilon", "layernorm_epsilon")),
        "rope_parameters": _rope_parameters(
            arguments, float(_stated(arguments, "rotary_base")), family
        ),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
        # transformers has numbers of its own for what is not stated.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family in ("mistral", "mixtral"):
        window = arguments.get("window_size")
        config["sliding_window"] = None if window is None else window[0] + 1
    if family == GPT_OSS:
        config |= gpt_oss_config(arguments)
    if family in DELTA_FAMILIES:
        config |= delta_config(arguments)
    if family in LATENT_FAMILIES:
        config |= latent_config(arguments)
    if family in INDEXER_FAMILIES:
        config |= indexer_config(arguments, family)
    if family in MIXTURE_FAMILIES:
        config |= expert_config(arguments, family)
    return config


def _refuse_unknown(arguments: Mapping[str, Any], model_type: str | None) -> None:
    """Refuse a family or an argument that cannot be expressed."""
    if model_type is not None and model_type not in MEGATRON_FAMILIES:
        raise CheckpointError(
            f"the arguments of Megatron-LM do not describe a {model_type} model; known are "
            f"{', '.join(MEGATRON_FAMILIES)}"
        )
    for name, (default, needed) in _needed(model_type or _family_of(arguments)).items():
        if arguments.get(name, default) != needed:
            raise CheckpointError(
                f"the checkpoint's {name} is {arguments.get(name, default)!r}; only {needed!r} has "
                f"a Hugging Face family here"
            )


def _needed(family: str) -> dict[str, tuple[Any, Any]]:
    """For each argument with one value in all models of a family, its default and the value."""
    if family in DELTA_FAMILIES:
        return _NEEDED | DELTA_NEEDS
    if family != GPT_OSS:
        return _NEEDED
    compared = ("position_embedding_type", "window_attn_skip_freq", "activation_func_clamp_value")
    return {name: pair for name, pair in (_NEEDED | NEEDS).items() if name not in compared}


def differences(spec: ModelSpec, arguments: Mapping[str, Any]) -> list[str]:
    """The contradictions between a checkpoint's stated arguments and a model, in words."""
    expected = arguments_of(spec, vocab_divisible_by=1)
    found = []
    for name in _COMPARED:
        is_used = name != "ffn_hidden_size" or spec.has_dense_layers
        # With latent attention, kv_channels mean nothing; without it, its sizes.
        is_used = is_used and name in expected and (spec.latent is None or name != "kv_channels")
        is_used = is_used and (spec.family != GPT_OSS or name != "add_qkv_bias")
        if is_used and arguments.get(name) not in (None, expected[name]):
            found.append(difference(name, arguments[name], expected[name]))

    found += delta_contradictions(spec, arguments)
    if "window_size" in arguments:
        window = arguments["window_size"] and tuple(arguments["window_size"])
        if window != expected["window_size"]:
            found.append(difference("window_size", window, expected["window_size"]))

    if spec.latent is not None and "rotary_scaling_factor" in arguments:
        for name, stated in stated_latent_rope(arguments).items():
            if stated != expected[name]:
                found.append(difference(name, stated, expected[name]))

    if spec.family == GPT_OSS:
        for name, stated in stated_gpt_oss(arguments).items():
            if stated != expected.get(name):
                found.append(difference(name, stated, expected.get(name)))

    found += indexer_problems(spec, arguments)
    found += contradictions(spec, arguments)
    for name, (_, needed) in _needed(spec.family).items():
        if arguments.get(name, needed) != needed:
            found.append(difference(name, arguments[name], needed))
    return found


def _family_of(arguments: Mapping[str, Any]) -> str:
    """The family with exactly the features that the arguments turn on."""
    if arguments.get("softmax_type") == "learnable":
        return GPT_OSS
    if arguments.get("experimental_attention_variant") == "gated_delta_net":
        return "qwen3_5_text" if arguments.get("num_experts") is None else "qwen3_next"
    if arguments.get("num_experts") is not None:
        return family_of_mixtures(arguments)
    features = {
        "qwen2": bool(arguments.get("add_qkv_bias")),
        "qwen3": bool(arguments.get("qk_layernorm")),
        "mistral": arguments.get("window_size") is not None,
    }
    families = [family for family, is_on in features.items() if is_on]
    if len(families) > 1:
        raise CheckpointError(
            f"the checkpoint has features of {' and '.join(families)} at once; no Hugging Face "
            f"family here has both"
        )
    return families[0] if families else "llama"


def _stated(arguments: Mapping[str, Any], *names: str) -> Any:
    """The first of these arguments that is stated."""
    for name in names:
        if arguments.get(name) is not None:
            return arguments[name]
    raise CheckpointError(
        f"the checkpoint's arguments do not state {names[0]}; give the directory of a Hugging Face "
        f"model of the same shape with --like"
    )


def _rope_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM for a rotation, except base and percent."""
    rope = dict(spec.hf_config["rope_parameters"])
    kind = rope.get("rope_type", "default")
    options: dict[str, Any] = {
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
    }

    if spec.family == GPT_OSS:
        return options
    if spec.latent is not None:
        options |= latent_rope_arguments(rope)
    elif kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3.items()):
        options["use_rope_scaling"] = True
        options["rope_scaling_factor"] = float(rope["factor"])
    elif kind == "linear" and float(rope["factor"]).is_integer():
        options["rotary_seq_len_interpolation_factor"] = int(rope["factor"])
    elif kind != "default":
        raise CheckpointError(
            f"the model rotates with {rope}; Megatron-LM has arguments for Llama 3's "
            f"{_LLAMA3} and for a linear factor that is an integer only"
        )
    return options


def _rope_parameters(arguments: Mapping[str, Any], theta: float, family: str) -> dict[str, Any]:
    """The `rope_parameters` in the `config.json` of a checkpoint's model; `theta` is the base."""
    if family == "glm4_moe" or family in DELTA_FAMILIES:
        share = arguments.get("rotary_percent", 1.0)
        return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
    if family == GPT_OSS:
        return gpt_oss_rope_parameters(arguments, theta)
    if family in LATENT_FAMILIES:
        return latent_rope_parameters(arguments, theta)
    linear = arguments.get("rotary_seq_len_interpolation_factor")
    if arguments.get("use_rope_scaling"):
        factor = float(arguments.get("rope_scaling_factor") or 8.0)
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    if linear is not None:
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(linear)}
    return {"rope_type": "default", "rope_theta": theta}
