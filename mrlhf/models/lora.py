"""Low-rank adapters as named tensors: which there are, their shapes, and how they are cut.

Each linear layer of the Hugging Face model has a pair A [rank, in] and B [out, rank] of its own,
also where a parameter holds several layers. The factor on the side that tensor parallelism splits
is split like the layer; every rank has the whole of the other. So an adapter means the same on
every layout, and to peft. Pure: this file knows no modules and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Rule, Shape

A = ".lora_A.weight"
B = ".lora_B.weight"
MODULE = "adapters"
"""The name of the module that holds the adapters of a linear layer."""
_WHOLE = (".self_attn.", ".per_layer_")  # in names of layers that ranks have whole, but routers


def is_adapter(tensor: str) -> bool:
    """Whether a named tensor is a factor of an adapter."""
    return tensor.endswith((A, B))


def weight_of(layer: str, shapes: Mapping[str, Shape]) -> str:
    """Return the tensor that is a linear layer's matrix: a part of a stack has the layer's name."""
    weight = f"{layer}.weight"
    return weight if weight in shapes else layer


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Return the base model, of which all would train."""
    return replace(spec, lora=None, frozen=frozenset())


def linear_layers(rule: Rule, shapes: Mapping[str, Shape]) -> list[str]:
    """Return the linear layers that a parameter holds, each once; none if it holds no matrix.

    Embeddings and output layers do not count, nor do gates of one row, nor indexers, which never
    train.
    """
    name = rule.names[0]
    shape = shapes.get(name, ())
    is_layer = ".layers." in name and (name.endswith(".weight") or rule.of_expert)
    is_layer = is_layer and ".indexer." not in name
    if len(shape) != 2 or shape[0] == 1 or not is_layer:
        return []
    return [tensor.removesuffix(".weight") for tensor in dict.fromkeys(rule.names)]


def adapted_layers(spec: ModelSpec, rule: Rule, shapes: Mapping[str, Shape]) -> list[str]:
    """Return the linear layers of a parameter that have an adapter; routers only if named."""
    is_router = rule.dim is None and not any(part in rule.names[0] for part in _WHOLE)
    if spec.lora is None or (is_router and spec.lora.targets is None):
        return []
    return [layer for layer in linear_layers(rule, shapes) if spec.lora.adapts(layer)]


def trained_shapes(
    shapes: Mapping[str, Shape], spec: ModelSpec, scalar_head: str
) -> dict[str, Shape]:
    """Return the tensors that train: adapters and a scalar head, or all, but those frozen."""
    trained = {name: shape for name, shape in shapes.items() if name not in spec.frozen}
    if spec.lora is None:
        return trained
    return {
        name: shape for name, shape in trained.items() if is_adapter(name) or name == scalar_head
    }


def adapter_shapes(spec: ModelSpec, shapes: Mapping[str, Shape], rule: Rule) -> dict[str, Shape]:
    """Return name and shape of the factors of the adapters of a parameter of a chunk."""
    factors: dict[str, Shape] = {}
    for layer in adapted_layers(spec, rule, shapes):
        assert spec.lora is not None
        rows, columns = shapes[weight_of(layer, shapes)]
        rank = spec.lora.rank_of(layer)
        factors[layer + A] = (rank, columns)
        factors[layer + B] = (rows, rank)
    return factors


def adapter_rules(
    spec: ModelSpec, shapes: Mapping[str, Shape], parameter: str, rule: Rule
) -> dict[str, Rule]:
    """Return the parameters of the adapters of a weight with this rule, and their rules."""
    rules: dict[str, Rule] = {}
    for layer in adapted_layers(spec, rule, shapes):
        own = f"{parameter.removesuffix('weight')}{MODULE}.{layer.rpartition('.')[2]}."
        a = Rule((layer + A,), dim=None, of_expert=rule.of_expert)
        b = Rule((layer + B,), dim=None, of_expert=rule.of_expert)
        rules[own + "lora_A"] = a._replace(dim=1) if rule.dim == 1 else a
        rules[own + "lora_B"] = _cut_rows(rule, layer) if rule.dim == 0 else b
    return rules


def _cut_rows(rule: Rule, layer: str) -> Rule:
    """Return the rule of a factor B, whose rows are cut like those of its layer."""
    layers = [name.removesuffix(".weight") for name in rule.names]
    parts = [number for number, name in enumerate(layers) if name == layer]
    names = (layer + B,) * len(parts)
    if rule.intervals is not None:  # a tensor of the file holds several of them, or all
        return rule._replace(names=names, intervals=tuple(rule.intervals[n] for n in parts))
    if len(names) == len(rule.names):
        return rule._replace(names=names)
    # All but the first are of KV heads, if any are; ranks of an engine may share these.
    kv_heads = None if layers[0] == layer else rule.periods
    return Rule(
        names,
        dim=0,
        periods=kv_heads,
        of_kv_heads=kv_heads is not None,
        of_expert=rule.of_expert,
    )


def with_adapters(names: Sequence[str], adapters: Iterable[str]) -> Iterator[str]:
    """Yield `names`, and after those of each linear layer its adapters, as a module does."""
    waiting: dict[str, list[str]] = {}
    for name in adapters:
        waiting.setdefault(name.split(f"{MODULE}.")[0], []).append(name)
    for name, following in zip(names, [*names[1:], ""], strict=True):
        yield name
        parents = name.split(".")[:-1]
        for depth in (len(parents), len(parents) - 1):  # its module, or one with a norm inside
            module = ".".join(parents[:depth]) + "."
            if module in waiting and not following.startswith(module):
                yield from waiting.pop(module)
