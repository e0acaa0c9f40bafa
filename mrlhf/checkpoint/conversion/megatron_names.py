"""Where each named tensor lies in a checkpoint of Megatron-LM, and what else such a checkpoint has.

A family's weight map says which named tensors a parameter holds. Here its parameters are found
under the names that Megatron-LM's checkpoints have for them: layers stacked into one tensor or not,
gate and up in one tensor or not, norms under their own names or those of TransformerEngine's fused
layers. Pure: this file reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.errors import CheckpointError
from mrlhf.models.families import Chunk, family_of
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Piece, Rule, Shape, local_shape, pieces_of

LAYERS = "decoder.layers."
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""TransformerEngine's names of a layer's norms, which recent Megatron-LM writes in any case."""

STATEFUL_MODULES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""The modules of a layer for which a checkpoint has an `_extra_state`, empty but for 8-bit runs."""

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_HALVES = {"_w": 0, "_v": 1}  # gate and up, where each is a tensor of its own

_LEFT_OUT = (
    (re.compile(r"(chained_\d+\.)?optimizer\."), "optimizer tensors or objects"),
    (
        re.compile(r".*\._extra_state\d*(/shard_.*)?"),
        "extra states (8-bit scaling factors, if any)",
    ),
    (re.compile(r"rng_state(/.*)?"), "states of random numbers"),
    (re.compile(r"rerun_state_machine_state(/.*)?"), "states of the rerun machine"),
    (re.compile(r"dataloader_state(/.*|\..*)?"), "states of the data loader"),
)


@dataclass(frozen=True)
class Home:
    """Where a named tensor lies.

    Attributes:
        key: the checkpoint's tensor that holds it.
        layer: the place along the first dimension of that tensor; None if it is no stack.
        rows: first dimension of the parameter, vocabulary padding left out.
        piece: where in the parameter the named tensor is.
        is_shared: whether the parameter holds other named tensors too.
    """

    key: str
    layer: int | None
    rows: int
    piece: Piece
    is_shared: bool


def whole_model(spec: ModelSpec) -> Chunk:
    """All layers, the embedding and the output layer."""
    return Chunk(range(spec.num_layers), is_first=True, is_last=True)


def split_names(names: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Part a checkpoint's names into those of weights and the rest.

    Returns:
        The names that may be weights, and how many names there are of each other kind.
    """
    weights = []
    counts: dict[str, int] = {}
    for name in names:
        kind = next((kind for pattern, kind in _LEFT_OUT if pattern.match(name)), None)
        if kind is None:
            weights.append(name)
        else:
            counts[kind] = counts.get(kind, 0) + 1
    return weights, counts


def find_homes(spec: ModelSpec, stored: Mapping[str, TensorForm], where: str) -> dict[str, Home]:
    """The home of every named tensor of the model.

    Args:
        spec: the model.
        stored: the checkpoint's weights, under its own names.
        where: the checkpoint's name, for messages.

    Raises:
        CheckpointError: the checkpoint has a weight that the model does not know, or of another
            shape, or twice; or it lacks one.
    """
    shapes = family_of(spec).tensor_shapes(spec)
    homes: dict[str, Home] = {}
    for key, tensor in stored.items():
        for home in _homes_in(spec, shapes, key, tensor, where):
            if home.piece.name in homes:
                raise CheckpointError(
                    f"{where}: {key} and {homes[home.piece.name].key} both hold "
                    f"{home.piece.name}; the checkpoint is not of this model"
                )
            homes[home.piece.name] = home

    missing = [name for name in shapes if name not in homes]
    if missing:
        raise CheckpointError(
            f"{where}: nothing holds {_first_three(missing)}; the checkpoint is not of this model "
            f"or not whole"
        )
    return homes


def _homes_in(
    spec: ModelSpec, shapes: Mapping[str, Shape], key: str, tensor: TensorForm, where: str
) -> Iterator[Home]:
    """The homes of all named tensors in one tensor of the checkpoint."""
    for parameter, layer, half in _parameters(key, spec.num_layers):
        rule = _rule(spec, shapes, parameter)
        if rule is None or (half is not None and len(rule.names) != 2):
            raise CheckpointError(
                f"{where}: the model has no place for {key}; is it another model?"
            )
        if half is not None:
            rule = Rule((rule.names[half],), dim=0)

        expected = local_shape(rule, shapes, tp_size=1)
        found = tensor.shape
        if layer is not None:
            if found[0] != spec.num_layers:
                raise CheckpointError(
                    f"{where}: {key} has {found[0]} layers and the model {spec.num_layers}"
                )
            found = found[1:]
        is_vocabulary = layer is None and len(rule.names) == 1 and rule.dim == 0
        enough = found[0] >= expected[0] if is_vocabulary else found[0] == expected[0]
        if not enough or found[1:] != expected[1:]:
            raise CheckpointError(
                f"{where}: {key} is {list(found)} and must be {list(expected)} in this model"
            )

        for piece in pieces_of(parameter, rule, shapes, tp_rank=0, tp_size=1):
            yield Home(key, layer, expected[0], piece, is_shared=len(rule.names) > 1)


def _parameters(key: str, num_layers: int) -> Iterator[tuple[str, int | None, int | None]]:
    """The parameters that a tensor of the checkpoint holds.

    Yields:
        The parameter's name, its place in a stack of layers, and which half of it the tensor is.
    """
    half = _HALVES.get(key[-2:])
    base = key if half is None else key[:-2]
    match = _LAYER.fullmatch(base)
    if match is None or match[1] is not None:
        yield base, None, half
        return
    for layer in range(num_layers):
        yield f"{LAYERS}{layer}.{match[2]}", layer, half


def _rule(spec: ModelSpec, shapes: Mapping[str, Shape], parameter: str) -> Rule | None:
    """What the weight map says of a parameter; None if the model has no such parameter."""
    try:
        rule = family_of(spec).rule_of(spec, whole_model(spec), parameter)
    except (KeyError, IndexError):
        return None
    return rule if all(name in shapes for name in rule.names) else None


def _first_three(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
