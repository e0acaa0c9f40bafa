"""The rotary frequencies of a model, exactly as transformers computes them.

Training and inference both rotate with these. This file does not know positions or how heads are
rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mrlhf.errors import ConfigError
from mrlhf.models.spec import WHOLE_MODEL, ModelSpec

_SUPPORTED = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """The rotation of q and k in a layer.

    Attributes:
        frequencies: radians for a step of one position, float32 [rotary_dim / 2], on the host.
        scale: cosines and sines are multiplied by it.
    """

    frequencies: Tensor
    scale: float


def check_rope(parameters: Mapping[str, Any], partial: bool) -> None:
    """Refuse rotary parameters of a `config.json` that no single table of angles expresses.

    Args:
        parameters: one entry of `rope_parameters`, as transformers completes it.
        partial: whether the family's heads may rotate in part. transformers' other families ignore
            `partial_rotary_factor` if the rope type is the default, and fail if it is not.

    Raises:
        ConfigError: the type is unknown or depends on the length of a sequence, or a number makes
            no sense.
    """
    rope_type = parameters["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"config.json: rope type {rope_type!r} is not supported: its frequencies depend on the "
            f"length of a sequence; use a model with {', '.join(_SUPPORTED[:-1])} or yarn"
        )
    if rope_type not in _SUPPORTED or rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ConfigError(
            f"config.json: rope type {rope_type!r} is not supported; use a model with "
            f"{', '.join(_SUPPORTED[:-1])} or yarn"
        )

    rope_theta = parameters["rope_theta"]
    if isinstance(rope_theta, bool) or not isinstance(rope_theta, int | float):
        raise ConfigError(f"config.json has rope_theta={rope_theta!r}; it must be a number")

    factor = parameters.get("partial_rotary_factor")
    if not partial and rope_type != "default" and factor not in (None, 1.0):
        raise ConfigError(
            f"config.json has partial_rotary_factor={factor}, which this family of transformers "
            f"has no place for; leave it out"
        )


def rope_type_of(spec: ModelSpec, kind: str) -> str:
    """Return the rope type in this entry of `spec.ropes`, such as "default" or "yarn"."""
    rope_type: str = _parameters(spec, kind)["rope_type"]
    return rope_type


def rope_of(spec: ModelSpec, kind: str = WHOLE_MODEL) -> Rope:
    """Return the rotation of the layers with this entry of `spec.ropes`."""
    parameters = _parameters(spec, kind)
    rope_type = parameters["rope_type"]
    rotary_dim = spec.of_layer(spec.ropes.index(kind)).rotary_dim
    if rope_type == "default":
        even = torch.arange(0, rotary_dim, 2, dtype=torch.int64)
        exponents = even.to(torch.float32) / rotary_dim
        return Rope(1.0 / (parameters["rope_theta"] ** exponents), 1.0)

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](
        AutoConfig.for_model(**spec.hf_config),
        torch.device("cpu"),
        layer_type=None if kind == WHOLE_MODEL else kind,
    )
    assert 2 * len(frequencies) == rotary_dim, (len(frequencies), rotary_dim)
    return Rope(frequencies.to(torch.float32), float(scale))


def keys_of_transformers_4(spec: ModelSpec, window_base: str | None) -> dict[str, Any]:
    """Return `rope_parameters` under the keys of `config.json` that transformers 4 reads.

    Where it has no place for the rotation, the base is null, so that it fails and does not guess.

    Args:
        window_base: its key for the base of layers with a window, if the family has one.
    """
    entries: dict[str, Any] = spec.hf_config["rope_parameters"]
    rope = entries if "rope_type" in entries else entries["full_attention"]
    keys: dict[str, Any] = {"rope_theta": rope["rope_theta"]}
    if rope is not entries:  # of other layers than those, it cannot scale the rotation
        others = [entry for entry in entries.values() if entry is not rope]
        if window_base is not None:
            keys[window_base] = entries["sliding_attention"]["rope_theta"]
        plain = ("default", keys.get(window_base or "rope_theta"))
        if any((entry["rope_type"], entry["rope_theta"]) != plain for entry in others):
            return {"rope_theta": None}

    if "partial_rotary_factor" in rope:  # in transformers 4, it rotates in part in every family
        is_partial = spec.rotary_dim < spec.head_dim
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"] if is_partial else 1.0
    if rope["rope_type"] != "default":
        keys["rope_scaling"] = {name: value for name, value in rope.items() if name not in keys}
    return keys


def _parameters(spec: ModelSpec, kind: str) -> dict[str, Any]:
    entries: dict[str, Any] = spec.hf_config["rope_parameters"]
    if kind == WHOLE_MODEL:
        return entries
    parameters: dict[str, Any] = entries[kind]
    return parameters
