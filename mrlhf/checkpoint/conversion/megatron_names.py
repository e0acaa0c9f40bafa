"""Finds each named tensor in a checkpoint of Megatron-LM, and names the rest of the checkpoint.

A family's weight map says which named tensors a parameter holds. This file finds the parameters
under Megatron-LM's names: with layers stacked into one tensor or not, gate and up in one tensor or
not, norms under their own names or those of TransformerEngine's fused layers. Pure: this file reads
no files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mrlhf.checkpoint.conversion.megatron_delta_nets import DELTA_NAMES, with_parts_apart
from mrlhf.checkpoint.conversion.megatron_gpt_oss import alternates
from mrlhf.checkpoint.conversion.megatron_indexers import INDEXER_NAMES
from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.errors import CheckpointError
from mrlhf.models.families import family_of
from mrlhf.models.families.mixing_weights import latent_parameters
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Piece, Rule, Shape, local_shape, pieces_of
from mrlhf.weights.stored import first_three

LAYERS = "decoder.layers."
# TransformerEngine's names of norms that a linear layer follows. Recent Megatron-LM writes them in
# any case, and without TransformerEngine for the norm before a mixture of experts too.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# The same with latent attention, whose input no linear layer normalises.
_FUSED_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight": _FUSED_NORMS["pre_mlp_layernorm.weight"],
}
# Megatron-LM's names, by ours, of sinks, and of a mixture's parts other than routers and experts.
_OTHER_NAMES = {
    "self_attention.sinks": "self_attention.core_attention.softmax_offset",
    "mlp.router.correction": "mlp.router.expert_bias",
    "mlp.shared.linear_fc1.weight": "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared.linear_fc2.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_gate.weight": "mlp.shared_experts.gate_weight",
    **INDEXER_NAMES,
}
_OUR_NAMES = {theirs: ours for ours, theirs in (_OTHER_NAMES | DELTA_NAMES).items()}

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_OUR_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_THEIR_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_HALVES = {"_w": 0, "_v": 1}  # gate and up, if each is a tensor of its own

_LEFT_OUT = {
    r"(chained_\d+\.)?optimizer\.": "optimizer tensors or objects",
    r".*\._extra_state\d*(/shard_.*)?": "extra states (8-bit scaling factors, if any)",
    r"rng_state(/.*)?": "states of random numbers",
    r"rerun_state_machine_state(/.*)?": "states of the rerun machine",
    r"dataloader_state(/.*|\..*)?": "states of the data loader",
}


@dataclass(frozen=True)
class Home:
    """The place of a named tensor."""

    key: str  # the checkpoint's tensor that holds it
    # The index along the first dimensions of that tensor, if they stack parameters: the number of
    # the layer, of the expert, both or none.
    numbers: tuple[int, ...]
    rows: int  # first dimension of the parameter, without vocabulary padding
    piece: Piece  # the place of the named tensor in the parameter
    is_shared: bool  # whether the parameter holds other named tensors too


@dataclass(frozen=True)
class StoredAt:
    """The tensor `key` of a checkpoint that holds a parameter; `numbers` as in `Home`."""

    key: str
    numbers: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()  # how many parameters are stacked along each of these dimensions

    def within(self, number: int, size: int) -> StoredAt:
        """The place if a further dimension stacks `size` parameters."""
        return StoredAt(self.key, (*self.numbers, number), (*self.sizes, size))


def stored_at(spec: ModelSpec, layer: int, name: str, fused_norms: bool) -> StoredAt:
    """The place where Megatron-LM's writer puts a layer's parameter or module, by its name there.

    It stacks layers only if all are alike, and experts always. With `fused_norms`, norms have the
    names of TransformerEngine's fused layers.
    """
    expert = _OUR_EXPERT.fullmatch(name)
    if expert is not None:
        name = f"mlp.experts.experts.{expert[2]}"
    elif fused_norms and not (name.startswith("pre_mlp") and spec.has_experts(layer)):
        # No layer follows the norm of a mixture at once, or a norm whose output an indexer takes.
        is_read = spec.indexer_of(0) is not None and name.startswith("self_attention.")
        fused = _FUSED_NORMS if spec.latent is None else _FUSED_LATENT_NORMS
        name = name if is_read else fused.get(name, name)
    name = _OTHER_NAMES.get(name, name)
    if spec.has_delta(layer):
        name = DELTA_NAMES.get(name, name)

    if spec.delta is None and (spec.experts is None or all(spec.experts.layers)):
        home = StoredAt(LAYERS + name, (layer,), (spec.num_layers,))
    else:
        home = StoredAt(f"{LAYERS}{layer}.{name}")
    if expert is None:
        return home
    assert spec.experts is not None, f"an expert in a dense model: {name}"
    return home.within(int(expert[1]), spec.experts.count)


def extra_states(spec: ModelSpec) -> Iterator[str]:
    """The names of a checkpoint's objects for modules, which are empty except in 8-bit runs."""
    for layer in range(spec.num_layers):
        blocks = ["mlp"]
        if spec.experts is not None and spec.has_experts(layer):
            blocks = [f"mlp.experts.{number}" for number in range(spec.experts.count)]
            if spec.experts.shared_ffn_size:
                blocks.append("mlp.shared_experts")
        layers = ["linear_qkv.weight", "linear_proj.weight"]
        if spec.latent is not None:
            layers = [name for name in latent_parameters(spec.latent) if name.startswith("linear")]
        if spec.has_delta(layer):
            layers = ["in_proj", "out_proj"]
        modules = [f"self_attention.{name.removesuffix('.weight')}" for name in layers]
        if spec.indexer_of(layer) is not None:
            names = INDEXER_NAMES.values()
            modules += [name.removesuffix(".weight") for name in names if "k_norm" not in name]
        modules += [f"{block}.linear_fc{part}" for block in blocks for part in (1, 2)]

        for module in modules:
            home = stored_at(spec, layer, f"{module}._extra_state", fused_norms=False)
            numbers = ".".join(map(str, home.numbers or (0,)))
            sizes = ".".join(map(str, home.sizes or (1,)))
            yield f"{home.key}/shard_{numbers}_{sizes}"


def split_names(names: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Separate a checkpoint's names into possible weights and the number of each other kind."""
    weights = []
    counts: Counter[str] = Counter()
    for name in names:
        kind = next((kind for pattern, kind in _LEFT_OUT.items() if re.match(pattern, name)), None)
        if kind is None:
            weights.append(name)
        else:
            counts[kind] += 1
    return weights, counts


def find_homes(spec: ModelSpec, stored: Mapping[str, TensorForm], where: str) -> dict[str, Home]:
    """Find the home of every named tensor of the model in the checkpoint `where`.

    `stored` are the checkpoint's weights, under its own names.

    Raises:
        CheckpointError: the checkpoint has a weight that the model does not know, or of another
            shape, or twice; or it lacks one.
    """
    family = family_of(spec)
    shapes = family.tensor_shapes(spec)
    # A layer's rules also name tensors of features that the model does not have.
    rules = {}
    for parameter, rule in with_parts_apart(spec, family.all_rules(spec)).items():
        if shapes.keys() >= set(rule.names):
            rules[parameter] = rule

    homes: dict[str, Home] = {}
    for key, tensor in stored.items():
        for home in _homes_in(spec, shapes, rules, key, tensor, where):
            if home.piece.name in homes:
                raise CheckpointError(
                    f"{where}: {key} and {homes[home.piece.name].key} both hold "
                    f"{home.piece.name}; the checkpoint is not of this model"
                )
            homes[home.piece.name] = home

    missing = [name for name in shapes if name not in homes]
    if missing:
        raise CheckpointError(
            f"{where}: nothing holds {first_three(missing)}; the checkpoint is not of this model "
            f"or not whole"
        )
    return homes


def _homes_in(
    spec: ModelSpec,
    shapes: Mapping[str, Shape],
    rules: Mapping[str, Rule],
    key: str,
    tensor: TensorForm,
    where: str,
) -> Iterator[Home]:
    """The homes of all named tensors in one tensor of the checkpoint."""
    for parameter, stacked, half in _parameters(spec, key):
        if half is not None and alternates(spec, parameter):
            raise CheckpointError(
                f"{where}: {key} holds gates or ups alone, which is not read of a {spec.family} "
                "model; save it without singleton_local_shards"
            )
        rule = rules.get(parameter)
        if rule is None or (half is not None and len(rule.names) != 2):
            raise CheckpointError(
                f"{where}: the model has no place for {key}; is it another model?"
            )
        if half is not None:
            rule = Rule((rule.names[half],), dim=0)

        depth = len(stacked.sizes)
        if tensor.shape[:depth] != stacked.sizes:
            raise CheckpointError(
                f"{where}: {key} stacks {list(tensor.shape[:depth])} layers or experts and the "
                f"model has {list(stacked.sizes)}"
            )
        expected = local_shape(rule, shapes, tp_size=1)
        found = tensor.shape[depth:]
        is_vocabulary = not parameter.startswith(LAYERS) and rule.dim == 0
        enough = found[:1] >= expected[:1] if is_vocabulary else found[:1] == expected[:1]
        if not enough or found[1:] != expected[1:]:
            raise CheckpointError(
                f"{where}: {key} is {list(found)} and must be {list(expected)} in this model"
            )

        for piece in pieces_of(parameter, rule, shapes, tp_rank=0, tp_size=1):
            yield Home(key, stacked.numbers, expected[0], piece, is_shared=len(rule.names) > 1)


def _parameters(spec: ModelSpec, key: str) -> Iterator[tuple[str, StoredAt, int | None]]:
    """The parameters that a tensor of the checkpoint holds.

    For each, its name, its place in the tensor, and which half of it the tensor is, if any.
    """
    half = _HALVES.get(key[-2:])
    base = key if half is None else key[:-2]
    match = _LAYER.fullmatch(base)
    if match is None:
        yield base, StoredAt(key), half
        return

    name = _OUR_NAMES.get(match[2], match[2])
    expert = _THEIR_EXPERT.fullmatch(name)
    # A dense model has no place for the first expert either, and so it is refused.
    count = 1 if spec.experts is None else spec.experts.count

    # The numbers that the tensor stacks, or the one in its name.
    layers = range(spec.num_layers) if match[1] is None else [int(match[1])]
    for layer in layers:
        outer = StoredAt(key)
        if match[1] is None:
            outer = outer.within(layer, spec.num_layers)
        if expert is None:
            yield f"{LAYERS}{layer}.{name}", outer, half
            continue

        experts = range(count) if expert[1] is None else [int(expert[1])]
        for number in experts:
            inner = outer.within(number, count) if expert[1] is None else outer
            yield f"{LAYERS}{layer}.mlp.experts.{number}.{expert[2]}", inner, half
