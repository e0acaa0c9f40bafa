"""gpt-oss under the names of Megatron-LM's command line, and of `config.json`.

megatron-core has the parts of this model, but no options for yarn: its `GPTModel` reads attributes
`yarn_*` of the configuration, and under these names the arguments have it. Of gates and ups, which
alternate in gpt-oss, it has the gates first. `megatron_arguments` and `megatron_experts` know the
rest of the model. Pure: this file knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mrlhf.errors import CheckpointError
from mrlhf.models.spec import ClampedSwish, ModelSpec

GPT_OSS = "gpt_oss"
_ALPHA = 1.702  # of megatron-core's quick_gelu
# Attributes that megatron-core reads, the keys of `config.json`, and transformers' defaults.
_YARN = {
    "yarn_rotary_scaling_factor": ("factor", 1.0),
    "yarn_original_max_position_embeddings": ("original_max_position_embeddings", None),
    "yarn_beta_fast": ("beta_fast", 32.0),
    "yarn_beta_slow": ("beta_slow", 1.0),
    "yarn_correction_range_round_to_int": ("truncate", True),
}
# Pairs of yarn_mscale and yarn_mscale_all_dim with which angles are scaled as in transformers.
_PLAIN_SCALES = ((None, None), (1.0, 0.0))

# Megatron-LM's default if an argument is not stated, and the value that gpt-oss needs.
NEEDS: dict[str, tuple[Any, Any]] = {
    "swiglu": (False, False),
    "quick_geglu": (False, True),
    "glu_linear_offset": (0.0, 1.0),
    "add_bias_linear": (True, True),
    "softmax_type": ("vanilla", "learnable"),
    "moe_router_pre_softmax": (False, False),
}
# The values that all other families need.
OTHERS_NEED: dict[str, tuple[Any, Any]] = {
    "quick_geglu": (False, False),
    "glu_linear_offset": (0.0, 0.0),
    "activation_func_clamp_value": (None, None),
    "softmax_type": ("vanilla", "vanilla"),
}


def beyond_gpt_oss(spec: ModelSpec) -> dict[str, bool]:
    """Features, in words, that megatron-core's layers lack, and whether the model has them."""
    gate = None if spec.experts is None else spec.experts.activation
    return {
        "gates whose alpha is not 1.702": isinstance(gate, ClampedSwish) and gate.alpha != _ALPHA,
        "attention without biases beside experts with biases": not spec.o_bias,
    }


def gpt_oss_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM for what gpt-oss alone has."""
    assert spec.experts is not None and isinstance(spec.experts.activation, ClampedSwish)
    frequency: int | list[int] = [int(window is not None) for window in spec.windows]
    if frequency == layers_between(2, spec.num_layers):
        frequency = 2  # its form on the command line
    return {
        **{name: needed for name, (_, needed) in NEEDS.items()},
        "add_qkv_bias": False,  # those of all linear layers
        "activation_func_clamp_value": spec.experts.activation.limit,
        "window_attn_skip_freq": frequency,
        **_yarn_arguments(spec.hf_config["rope_parameters"]),
    }


def gpt_oss_options(arguments: Mapping[str, Any]) -> list[str]:
    """The options of `pretrain_gpt.py` for `gpt_oss_arguments`, but for yarn, which has none."""
    frequency = str(arguments["window_attn_skip_freq"]).replace(" ", "")
    return [
        "--quick-geglu",
        "--glu-linear-offset 1.0",
        f"--activation-func-clamp-value {arguments['activation_func_clamp_value']}",
        "--softmax-type learnable",
        f"--window-attn-skip-freq {frequency}",
    ]


def gpt_oss_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json` for what gpt-oss alone has, but for its rotation."""
    window = arguments.get("window_size")
    if window is None:
        raise CheckpointError("the checkpoint's window_size is None; a gpt_oss model has windows")
    layers = layers_between(arguments.get("window_attn_skip_freq"), int(arguments["num_layers"]))
    kinds = ("full_attention", "sliding_attention")
    return {
        "attention_bias": True,
        "sliding_window": window[0] + 1,
        "layer_types": [kinds[has_window] for has_window in layers],
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": arguments.get("activation_func_clamp_value"),
    }


def gpt_oss_rope_parameters(arguments: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The `rope_parameters` of a checkpoint's model; `theta` is the base."""
    if arguments.get("position_embedding_type") != "yarn":
        return {"rope_type": "default", "rope_theta": theta}
    scales = (arguments.get("yarn_mscale"), arguments.get("yarn_mscale_all_dim"))
    if None not in scales and scales not in _PLAIN_SCALES:
        raise CheckpointError(
            f"the checkpoint's yarn_mscale and yarn_mscale_all_dim are {scales}; only "
            f"{_PLAIN_SCALES[1]} has a form in a gpt_oss model"
        )
    stated = {key: arguments.get(name, default) for name, (key, default) in _YARN.items()}
    return {"rope_type": "yarn", "rope_theta": theta, **stated}


def stated_gpt_oss(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a checkpoint's arguments about gpt-oss that are compared, in the form of ours."""
    names = (*_YARN, "position_embedding_type", "activation_func_clamp_value")
    stated = {name: arguments[name] for name in names if name in arguments}
    if "window_attn_skip_freq" in arguments:
        frequency = arguments["window_attn_skip_freq"]
        layers = layers_between(frequency, int(arguments.get("num_layers") or 0))
        is_alternating = layers == layers_between(2, len(layers))
        stated["window_attn_skip_freq"] = 2 if is_alternating else layers
    return stated


def alternates(spec: ModelSpec, parameter: str) -> bool:
    """Whether a parameter has rows of gates and ups that alternate, and Megatron-LM's gates first.

    `parameter` is a name there or here.
    """
    is_clamped = spec.experts is not None and isinstance(spec.experts.activation, ClampedSwish)
    return is_clamped and ".experts." in parameter and ".linear_fc1." in parameter


def gates_first(rows: Tensor) -> Tensor:
    """Put rows of gates, which alternate with those of ups, before these."""
    return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def alternating(rows: Tensor) -> Tensor:
    """Undo `gates_first`."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def layers_between(frequency: Any, num_layers: int) -> list[int]:
    """For each layer 0 if its number is a multiple of the frequency, else 1; a list says it all."""
    if isinstance(frequency, list):
        return [int(bool(is_between)) for is_between in frequency]
    if frequency is None:
        return [1] * num_layers
    return [int(layer % frequency != 0) for layer in range(1, num_layers + 1)]


def _yarn_arguments(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the rotation, except base and percent; CheckpointError if there are none.

    megatron-core scales angles as transformers does with `yarn_mscale` 1 and the other 0.
    """
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {"position_embedding_type": "rope"}
    keys = {key for key, _ in _YARN.values()}
    others = {key for key in rope if rope[key] is not None} - {*keys, "rope_type", "rope_theta"}
    if kind != "yarn" or others - {"type"}:
        raise CheckpointError(
            f"the model rotates with {dict(rope)}; megatron-core has attributes for "
            f"{', '.join(sorted(keys))} of yarn only"
        )
    yarn = {name: rope.get(key, default) for name, (key, default) in _YARN.items()}
    return {
        "position_embedding_type": "yarn",
        **yarn,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
    }
