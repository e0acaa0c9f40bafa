"""Checks the values of a `config.json` that any family may have, before they are used.

transformers checks few of them, and a wrong one would be used in silence or end in an error that
names no key. This file knows values; families know what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.weights.quantised import FP8_BLOCK, INT4_GROUP

_LARGEST_COUNT = 10**9
_QUANTISED = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class _Range:
    """The numbers that a key may have.

    Attributes:
        low: smallest value.
        high: largest value.
        whole: whether it must be an integer.
        above: whether it must be larger than `low`.
    """

    low: float
    high: float
    whole: bool = True
    above: bool = False

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        if self.above:
            return f"{kind} above {self.low:,} and at most {self.high:,}"
        return f"{kind} from {self.low:,} to {self.high:,}"

    def holds(self, value: object) -> bool:
        """Whether `value` is such a number; true and false are not."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        if not self.whole and not math.isfinite(value):
            return False
        return value <= self.high and (value > self.low if self.above else value >= self.low)


_COUNT = _Range(1, _LARGEST_COUNT)
_POSITIVE = _Range(0, 1e30, whole=False, above=True)
_SHARE = _Range(0, 1, whole=False, above=True)
_TOKEN = _Range(-1, _LARGEST_COUNT)
_NUMBERS = {
    "vocab_size": _COUNT,
    "hidden_size": _Range(1, 10**6),
    "intermediate_size": _Range(1, 10**7),
    "num_hidden_layers": _Range(1, 10**4),
    "num_attention_heads": _Range(1, 10**5),
    "num_key_value_heads": _Range(1, 10**5),
    "head_dim": _Range(1, 10**5),
    "q_lora_rank": _Range(1, 10**6),
    "kv_lora_rank": _Range(1, 10**6),
    "qk_nope_head_dim": _Range(1, 10**5),
    "qk_rope_head_dim": _Range(1, 10**5),
    "v_head_dim": _Range(1, 10**5),
    "max_position_embeddings": _COUNT,
    "rms_norm_eps": _SHARE,
    "layer_norm_eps": _SHARE,
    "initializer_range": _Range(0, 1e3, whole=False),
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _SHARE,
    "sliding_window": _Range(0, _LARGEST_COUNT),  # 0 in a file of a Qwen2-MoE model without windows
    "pad_token_id": _TOKEN,
    "bos_token_id": _TOKEN,
    "num_labels": _COUNT,
}
_FP8_BLOCKS = [FP8_BLOCK, FP8_BLOCK]
# The integers that are read of `quant_method: compressed-tensors`.
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": INT4_GROUP}
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "use_qk_norm",
    "norm_topk_prob",
    "qkv_bias",
    "rope_interleave",
)
_ROPE_NUMBERS = {
    "rope_theta": _POSITIVE,
    "factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "original_max_position_embeddings": _COUNT,
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "mscale": _POSITIVE,
    "mscale_all_dim": _POSITIVE,
    "partial_rotary_factor": _SHARE,
}


def check_values(config: Mapping[str, Any], quantisations: Sequence[str] = ()) -> None:
    """Refuse wrong kinds, sizes and quantised weights; a ConfigError names the key.

    `quantisations` are the methods of `quantization_config` that can be read.
    """
    for key in _QUANTISED:
        stated = config.get(key)
        method = stated.get("quant_method") if isinstance(stated, dict) else None
        if stated is None or method in quantisations:
            continue
        if not _is_block_fp8(stated) and not _is_packed_int4(stated):
            others = "".join(f"{name}, " for name in quantisations)
            raise ConfigError(
                f"{key} says that the weights are quantised, which is not supported but for "
                f"{others}fp8 with weight_block_size {_FP8_BLOCKS} and compressed-tensors in "
                f"format pack-quantized with {_INT4}; give the model in bfloat16, float16 or "
                "float32"
            )
    if config.get("transformers_weights") is not None:
        raise ConfigError(
            "transformers_weights names another file of weights, which is not supported; leave it "
            "out and name the file model.safetensors"
        )

    for key in ("dtype", "torch_dtype"):
        dtype = config.get(key)
        if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
            raise ConfigError(f"{key} is {_shown(dtype)}; it must be one of {', '.join(_DTYPES)}")

    _check_numbers("", _NUMBERS, config)
    _check_tokens("eos_token_id", config.get("eos_token_id"))
    pad = config.get("pad_token_id")
    if pad is not None and pad >= config["vocab_size"]:
        raise ConfigError(f"pad_token_id {pad} is not below vocab_size {config['vocab_size']}")
    for key in _FLAGS:
        if not isinstance(config.get(key), bool | None):
            raise ConfigError(f"{key} is {config[key]!r}; it must be true or false")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(key, config.get(key))


def _is_block_fp8(quantisation: object) -> bool:
    """Whether weights are fp8 in blocks, whose numbers are multiplied out when they are read."""
    if not isinstance(quantisation, dict) or quantisation.get("quant_method") != "fp8":
        return False
    return quantisation.get("weight_block_size") == _FP8_BLOCKS


def _is_packed_int4(quantisation: object) -> bool:
    """Whether weights are packed integers of 4 bits, multiplied out when they are read."""
    if not isinstance(quantisation, dict):
        return False
    kind = (quantisation.get("quant_method"), quantisation.get("format"))
    groups = quantisation.get("config_groups")
    if kind != ("compressed-tensors", "pack-quantized") or not isinstance(groups, dict):
        return False
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or group.get("input_activations") is not None:
            return False
        if {key: weights.get(key) for key in _INT4} != _INT4 or weights.get("actorder"):
            return False
    return True


def _check_numbers(prefix: str, ranges: Mapping[str, _Range], values: Mapping[str, Any]) -> None:
    for key, allowed in ranges.items():
        value = values.get(key)
        if value is not None and not allowed.holds(value):
            raise ConfigError(f"{prefix}{key} is {_shown(value)}; it must be {allowed}")


def _check_tokens(key: str, value: object) -> None:
    """Refuse a value that is neither a token id nor a list of them."""
    ids = value if isinstance(value, list) else [value]
    if not all(token is None or _TOKEN.holds(token) for token in ids):
        raise ConfigError(f"{key} is {_shown(value)}; it must be a token id or a list of them")


def _check_rope(key: str, rope: object) -> None:
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise ConfigError(f"{key} is {_shown(rope)}; it must be an object")
    for name in ("rope_type", "type"):
        if not isinstance(rope.get(name), str | None):
            raise ConfigError(f"{key}.{name} is {_shown(rope[name])}; it must be a string")
    _check_numbers(f"{key}.", _ROPE_NUMBERS, rope)


def _shown(value: object) -> str:
    """A value as the user wrote it, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
