"""Gated delta nets, and the gated attention beside them, as Megatron-LM has them.

A net's projections and its convolution are in one matrix each in Megatron-LM, which its checkpoints
hold in parts: all queries, all keys and so on. Its norm multiplies by 1 + its weight, as all norms
of the model do, and Hugging Face's by its weight. Of gated attention a KV head's queries come
first, then their gates. `megatron_arguments` and `megatron_experts` know the rest of the model.
This file knows no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.megatron_experts import difference
from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.errors import CheckpointError
from mrlhf.models.spec import DeltaNet, ModelSpec
from mrlhf.weights.shard import Rule

DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# The sizes of a net under their names there and in `config.json`, and here.
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
    "apply_layernorm_1p": (True, True),  # its option, and its name before megatron-core 0.16
}
# Megatron-LM's names, by ours, of a net's other parameters.
DELTA_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "self_attention.in_proj.layer_norm_weight",
    "self_attention.norm": "self_attention.out_norm.weight",
    "self_attention.linear_proj.weight": "self_attention.out_proj.weight",
}
_GATED = "self_attention.linear_qkv.weight"
_NORM = "self_attention.norm"
_PARTS = {"q": "query", "k": "key", "v": "value", "z": "z", "b": "beta", "a": "alpha"}
_FUSED = ("linear_qkvz.weight", "linear_ba.weight", "conv1d")  # our parameters that hold them
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
        "linear_attention_freq": _frequency(net.layers),
        **{name: getattr(net, field) for name, field in DELTA_SIZES.items()},
    }


def delta_options(arguments: Mapping[str, Any]) -> list[str]:
    """The options of `pretrain_gpt.py` for `delta_arguments`, but for sizes."""
    if "linear_attention_freq" not in arguments:
        return []
    frequency = str(arguments["linear_attention_freq"]).replace(" ", "")
    return [
        "--experimental-attention-variant gated_delta_net",
        f"--linear-attention-freq {frequency}",
        "--attention-output-gate",
        "--apply-layernorm-1p",
    ]


def delta_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json` for delta nets and what comes with them."""
    kinds = ("full_attention", "linear_attention")
    is_delta = _layers(arguments.get("linear_attention_freq"), int(arguments["num_layers"]))
    return {
        "layer_types": [kinds[has_net] for has_net in is_delta],
        "attention_bias": bool(arguments.get("add_qkv_bias")),
        **{name: arguments.get(name) for name in DELTA_SIZES},
    }


def delta_contradictions(spec: ModelSpec, arguments: Mapping[str, Any]) -> list[str]:
    """The contradictions between a checkpoint's stated arguments and the layers of the model."""
    name = "experimental_attention_variant"
    if spec.delta is None:
        stated = arguments.get(name)
        return [difference(name, stated, None)] if stated == DELTA_NEEDS[name][1] else []
    name = "linear_attention_freq"
    if name not in arguments:
        return []
    layers = _layers(arguments[name], spec.num_layers)
    expected = [int(is_delta) for is_delta in spec.delta.layers]
    return [difference(name, layers, expected)] if layers != expected else []


def with_parts_apart(spec: ModelSpec, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules of a model's parameters, with each tensor that Megatron-LM cuts as a parameter.

    The names of these end with those of the tensors.
    """
    changed = dict(rules)
    for net, own in _nets(spec):
        prefix = rules[f"{own}A_log"].names[0].removesuffix("A_log")
        for name in _FUSED:
            del changed[own + name]
        for tensor in _parts_of(net):
            changed[own + tensor] = Rule((prefix + tensor,), dim=None)
    return changed


def to_megatron(spec: ModelSpec, layer: int, name: str, values: Tensor) -> dict[str, Tensor]:
    """What Megatron-LM stores of a layer's parameter of `with_parts_apart`, by names of both."""
    net = spec.delta
    if net is None or not net.layers[layer]:
        return {name: _gates_last(spec, values) if spec.output_gate and name == _GATED else values}
    if name == _NORM:
        return {name: values.to(_WIDER[values.dtype]) - 1}

    begin, _, tensor = name.partition(".")
    parts = _parts_of(net).get(tensor, {})
    if not parts:
        return {name: values}
    heads = _heads(net, tensor)
    cut = values.unflatten(0, (heads, -1)).split([n // heads for n in parts.values()], dim=1)
    return {f"{begin}.{part}": rows.flatten(0, 1) for part, rows in zip(parts, cut, strict=True)}


def from_megatron(spec: ModelSpec, key: str, parts: Sequence[Tensor]) -> Tensor:
    """Undo `to_megatron` for the tensor `key` of `joined_forms`, whose dtype a norm may lack."""
    if spec.delta is None:
        return parts[0]
    if key.endswith(DELTA_NAMES[_NORM]):
        return parts[0].double() + 1
    if key.endswith(_GATED):
        return _gates_last(spec, parts[0], undo=True)
    if len(parts) == 1:
        return parts[0]
    heads = _heads(spec.delta, key.partition("self_attention.")[2])
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def joined_forms(
    spec: ModelSpec, stored: Mapping[str, TensorForm], where: str
) -> tuple[dict[str, TensorForm], dict[str, list[str]]]:
    """The tensors of a checkpoint with those of delta nets joined, and the parts of each of these.

    Raises:
        CheckpointError: a part is missing or has another number of rows.
    """
    forms = dict(stored)
    joined: dict[str, list[str]] = {}
    for net, own in _nets(spec):
        for tensor, parts in _parts_of(net).items():
            for part, count in parts.items():
                form = forms.pop(own + part, None)
                rows = None if form is None else form.shape[0]
                if form is None or rows != count:
                    raise CheckpointError(
                        f"{where}: {own}{part} has {rows or 'no'} rows and must have {count} in "
                        "this model; the checkpoint is not of this model or not whole"
                    )
                shape = (sum(parts.values()), *form.shape[1:])
                forms[own + tensor] = TensorForm(shape, form.dtype)
            joined[own + tensor] = [own + part for part in parts]

        norm = forms.get(own + "out_norm.weight")
        matrix = forms.get(own + "out_proj.weight")
        if norm is not None and matrix is not None:
            dtype = min(norm.dtype, matrix.dtype, key=lambda dtype: dtype.itemsize)
            if norm.dtype == torch.float64:
                dtype = torch.float32
            forms[own + "out_norm.weight"] = TensorForm(norm.shape, dtype)
    return forms, joined


def _nets(spec: ModelSpec) -> Iterator[tuple[DeltaNet, str]]:
    """Each net, and how the names of its parameters begin."""
    for layer in range(spec.num_layers):
        if spec.delta is not None and spec.delta.layers[layer]:
            yield spec.delta, f"decoder.layers.{layer}.self_attention."


def _parts_of(net: DeltaNet) -> dict[str, dict[str, int]]:
    """The tensors that Megatron-LM cuts: their parts there, and the rows of each."""
    sizes = dict(zip("qkvzba", _sizes(net), strict=True))
    cut = {"conv1d.weight": ("conv1d.weight", "qkv")}
    for letters in ("qkvz", "ba") if net.fused_tensors else ("qkv", "z", "b", "a"):
        cut[f"in_proj_{letters}.weight"] = ("in_proj.weight", letters)
    return {
        tensor: {f"{matrix}.{_PARTS[letter]}": sizes[letter] for letter in letters}
        for tensor, (matrix, letters) in cut.items()
    }


def _sizes(net: DeltaNet) -> tuple[int, ...]:
    heads = net.value_heads
    return (net.key_size, net.key_size, net.value_size, net.value_size, heads, heads)


def _heads(net: DeltaNet, tensor: str) -> int:
    """How often the parts take turns in a tensor: once a key head, or once."""
    return net.key_heads if net.fused_tensors and tensor.startswith("in_proj") else 1


def _gates_last(spec: ModelSpec, rows: Tensor, undo: bool = False) -> Tensor:
    """Put the gates of a KV head's queries, each of which follows its query, behind all of them."""
    queries = spec.num_heads // spec.num_kv_heads
    order = torch.arange(2 * queries).view(-1, 2).t().flatten()
    order = torch.cat([order, torch.tensor([2 * queries, 2 * queries + 1])])  # and k and v
    order = order.argsort() if undo else order
    return rows.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))[:, order].flatten(0, 2)


def _layers(frequency: Any, num_layers: int) -> list[int]:
    """For each layer 1 if this `linear_attention_freq` gives it a delta net, else 0."""
    if isinstance(frequency, list):
        return [int(bool(has_net)) for has_net in frequency]
    if not isinstance(frequency, int) or frequency < 1:
        raise CheckpointError(
            f"the checkpoint's linear_attention_freq is {frequency!r}; it must be a positive "
            "integer, or a list of 0 and 1"
        )
    return [int(layer % frequency != 0) for layer in range(1, num_layers + 1)]


def _frequency(layers: Sequence[bool]) -> int | list[int]:
    """The `linear_attention_freq` of these layers; an integer if there is one."""
    is_delta = [int(has_net) for has_net in layers]
    first = is_delta.index(0) + 1
    return first if is_delta == _layers(first, len(layers)) else is_delta
