"""Gated delta nets, and the gated attention beside them, as Megatron-LM has them.

Its checkpoints hold a net's projections and convolution in parts: all queries, all keys and so on.
A net's norm multiplies by 1 + its weight there, as the model's other norms do, and by its weight in
Hugging Face's files. In gated attention the gates of a KV head follow all of its queries there, and
each its query here. This file knows no files, and `megatron_arguments` the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.megatron_experts import difference
from mrlhf.checkpoint.conversion.megatron_gpt_oss import layers_between
from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.models.spec import DeltaNet, ModelSpec
from mrlhf.weights.shard import Rule

DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# The sizes of a net by their names there and in `config.json`.
DELTA_SIZES = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "taps",
}
# Megatron-LM's default if an argument is not stated, and the value that these families need.
DELTA_NEEDS: dict[str, tuple[Any, Any]] = {
    "experimental_attention_variant": (None, "gated_delta_net"),
    "attention_output_gate": (False, True),
    "layernorm_zero_centered_gamma": (False, True),
    "apply_layernorm_1p": (True, True),  # the option for it
}
# Megatron-LM's names, by ours, of a net's other parameters.
DELTA_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "self_attention.in_proj.layer_norm_weight",
    "self_attention.norm": "self_attention.out_norm.weight",
    "self_attention.linear_proj.weight": "self_attention.out_proj.weight",
}
_PARTS = {"q": "query", "k": "key", "v": "value", "z": "z", "b": "beta", "a": "alpha"}
# Where a weight less 1 keeps its bits; in its own dtype one below 1/2 would lose some.
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}


def delta_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM for delta nets and what comes with them; none without them."""
    net = spec.delta
    if net is None:
        return {}
    return {
        **{name: needed for name, (_, needed) in DELTA_NEEDS.items()},
        "linear_attention_freq": [int(has_net) for has_net in net.layers],
        **{name: getattr(net, field) for name, field in DELTA_SIZES.items()},
    }


def delta_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json` for delta nets."""
    kinds = ("full_attention", "linear_attention")
    layers = layers_between(arguments.get("linear_attention_freq"), int(arguments["num_layers"]))
    sizes = {name: arguments.get(name) for name in DELTA_SIZES}
    return {"layer_types": [kinds[has_net] for has_net in layers], **sizes}


def delta_contradictions(spec: ModelSpec, arguments: Mapping[str, Any]) -> list[str]:
    """The contradiction between a checkpoint's layers with nets, if it states them, and ours."""
    name = "linear_attention_freq"
    frequency = arguments.get(name)
    stated = None if frequency is None else layers_between(frequency, spec.num_layers)
    expected = None if spec.delta is None else [int(has_net) for has_net in spec.delta.layers]
    is_wrong = name in arguments and stated != expected
    return [difference(name, stated, expected)] if is_wrong else []


def with_parts_apart(spec: ModelSpec, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules of a model's parameters, with each tensor that Megatron-LM cuts as a parameter."""
    changed = dict(rules)
    for net, own in _nets(spec):
        prefix = rules[f"{own}A_log"].names[0].removesuffix("A_log")
        for name in ("linear_qkvz.weight", "linear_ba.weight", "conv1d"):
            del changed[own + name]
        for tensor in _parts_of(net):
            changed[own + tensor] = Rule((prefix + tensor,), dim=None)
    return changed


def to_megatron(spec: ModelSpec, layer: int, name: str, values: Tensor) -> dict[str, Tensor]:
    """What Megatron-LM stores of a layer's parameter of `with_parts_apart`."""
    net = spec.delta
    if net is None or not net.layers[layer]:
        is_gated = spec.output_gate and name == "self_attention.linear_qkv.weight"
        return {name: _gates_last(spec, values) if is_gated else values}
    if name == "self_attention.norm":
        return {name: values.to(_WIDER[values.dtype]) - 1}
    parts = _parts_of(net).get(name.removeprefix("self_attention."))
    if parts is None:
        return {name: values}

    heads = _turns(net, name)
    rows = [count // heads for count in parts.values()]
    cut = values.unflatten(0, (heads, -1)).split(rows, dim=1)
    return {f"self_attention.{part}": cut[n].flatten(0, 1) for n, part in enumerate(parts)}


def from_megatron(spec: ModelSpec, key: str, parts: Sequence[Tensor]) -> Tensor:
    """Undo `to_megatron` for the tensor `key` of `joined_forms`; a norm is float64."""
    if spec.delta is None:
        return parts[0]
    if key.endswith("self_attention.out_norm.weight"):
        return parts[0].double() + 1
    if key.endswith("self_attention.linear_qkv.weight"):
        return _gates_last(spec, parts[0], undo=True)
    if len(parts) == 1:
        return parts[0]
    heads = _turns(spec.delta, key)
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def joined_forms(
    spec: ModelSpec, stored: Mapping[str, TensorForm]
) -> tuple[dict[str, TensorForm], dict[str, list[str]]]:
    """The tensors of a checkpoint with those of nets joined, and the parts of each of these."""
    forms = dict(stored)
    joined: dict[str, list[str]] = {}
    for net, own in _nets(spec):
        for tensor, parts in _parts_of(net).items():
            held = [own + part for part in parts if own + part in stored]
            if held:
                shape = (sum(forms.pop(part).shape[0] for part in held), *stored[held[0]].shape[1:])
                forms[own + tensor] = TensorForm(shape, stored[held[0]].dtype)
                joined[own + tensor] = held

        norm, matrix = (stored.get(f"{own}{name}.weight") for name in ("out_norm", "out_proj"))
        if norm is not None and matrix is not None and norm.dtype != matrix.dtype:
            dtype = torch.float32 if norm.dtype == torch.float64 else matrix.dtype
            forms[f"{own}out_norm.weight"] = TensorForm(norm.shape, dtype)  # before it was widened
    return forms, joined


def _nets(spec: ModelSpec) -> Iterator[tuple[DeltaNet, str]]:
    """Each net, and how the names of its parameters begin."""
    for layer in range(spec.num_layers):
        if spec.delta is not None and spec.delta.layers[layer]:
            yield spec.delta, f"decoder.layers.{layer}.self_attention."


def _parts_of(net: DeltaNet) -> dict[str, dict[str, int]]:
    """The tensors that Megatron-LM cuts: their parts there, and the rows of each."""
    heads = net.value_heads
    rows = (net.key_size, net.key_size, net.value_size, net.value_size, heads, heads)
    rows_of = dict(zip(_PARTS, rows, strict=True))
    cut = {"conv1d.weight": {f"conv1d.weight.{_PARTS[part]}": rows_of[part] for part in "qkv"}}
    for parts in ("qkvz", "ba") if net.fused_tensors else ("qkv", "z", "b", "a"):
        in_proj = {f"in_proj.weight.{_PARTS[part]}": rows_of[part] for part in parts}
        cut[f"in_proj_{parts}.weight"] = in_proj
    return cut


def _turns(net: DeltaNet, tensor: str) -> int:
    """How often the parts take turns in a tensor: once a key head, or once."""
    return net.key_heads if net.fused_tensors and ".in_proj" in tensor else 1


def _gates_last(spec: ModelSpec, rows: Tensor, undo: bool = False) -> Tensor:
    """Put the gates of each KV head behind all of its queries, before k and v."""
    heads = rows.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
    pairs = heads[:, :-2].unflatten(1, (2, -1) if undo else (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, -2:]], dim=1).flatten(0, 2)
