"""The rotary frequencies of a model, exactly as transformers computes them.

Training and inference both rotate with these. This file knows frequencies only; positions and
rotation are the models' business.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mrlhf.errors import ConfigError
from mrlhf.models.spec import ModelSpec

# Their frequencies change with the length of the sequence, so no single table is right.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Radians by which a step of one position rotates, float32 [head_dim / 2], on the host.

    Raises:
        ConfigError: the rope type is unknown, depends on the length, scales attention, or rotates
            part of a head.
    """
    config = AutoConfig.for_model(**spec.hf_config)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        even = torch.arange(0, spec.head_dim, 2, dtype=torch.int64)
        exponents = even.to(torch.float32) / spec.head_dim
        return 1.0 / (spec.rope_theta**exponents)

    if rope_type not in ROPE_INIT_FUNCTIONS or rope_type in _LENGTH_DEPENDENT:
        raise ConfigError(
            f"config.json: rope type {rope_type!r} is not supported; use default, linear or llama3"
        )

    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    if attention_factor != 1.0 or 2 * len(frequencies) != spec.head_dim:
        raise ConfigError(
            f"config.json: rope type {rope_type!r} scales attention by {attention_factor} and "
            f"rotates {2 * len(frequencies)} of {spec.head_dim} dimensions; only 1.0 and the whole "
            f"head are supported"
        )
    return frequencies.to(torch.float32)
