"""Adapters of experts that files hold in stacks, as peft writes them: those of a layer in one.

transformers keeps a matrix of all experts as one parameter, which peft adapts with one A, [experts
* rank, in], and one B, [out, rank * experts], in whose rows the experts alternate. The second such
parameter of a module has names of its own, and the first one those of what it wraps. This file
knows names and shapes, and does not read files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from mrlhf.models.families import family_of
from mrlhf.models.lora import A, B
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.forms import Columns, OtherForm, Rows
from mrlhf.weights.shard import Shape

_JOINED = re.compile(r"(.*\.experts)\.(?:base_layer\.)?lora_[AB]\.weight")
_WRAPPED = ".base_layer"


def joins_experts(spec: ModelSpec) -> bool:
    """Whether peft adapts the experts of a layer of the model as one."""
    return bool(family_of(spec).written_forms(spec))


def joined_module(tensor: str) -> str | None:
    """The module of experts, if a tensor is a factor of all of them."""
    found = _JOINED.fullmatch(tensor)
    return None if found is None else found[1]


def joined_forms(spec: ModelSpec) -> dict[str, OtherForm]:
    """The joined factors of the model's adapters, by their names without peft's prefix."""
    forms: dict[str, OtherForm] = {}
    assert spec.lora is not None and spec.experts is not None
    count = spec.experts.count
    for module, shapes in _matrices(spec).items():
        adapted = [own for own in shapes if spec.lora.adapts(f"{module}.0.{own}")]
        for number, own in enumerate(adapted):
            name = module if number == len(adapted) - 1 else module + _WRAPPED
            layers = [f"{module}.{expert}.{own}" for expert in range(count)]
            rank = spec.lora.rank_of(layers[0])
            rows, columns = shapes[own]
            firsts = {layer + A: Rows(n * rank, (n + 1) * rank) for n, layer in enumerate(layers)}
            seconds = {layer + B: Columns(n, count) for n, layer in enumerate(layers)}
            forms[name + A] = OtherForm((count * rank, columns), firsts)
            forms[name + B] = OtherForm((rows, rank * count), seconds)
    return forms


def joined_layers(stored: Mapping[str, Shape], spec: ModelSpec) -> Iterable[str]:
    """The layers of experts whose joined factors are among tensors without peft's prefix.

    Shapes tell a module's matrices apart; those of another model are for the caller to refuse.
    """
    assert spec.experts is not None
    for module, shapes in _matrices(spec).items():
        for name in (module, module + _WRAPPED):
            if not {name + A, name + B} <= stored.keys():
                continue
            found = (stored[name + B][0], stored[name + A][-1])
            for own, shape in shapes.items():
                if shape == found:
                    yield from (f"{module}.{expert}.{own}" for expert in range(spec.experts.count))


def _matrices(spec: ModelSpec) -> dict[str, dict[str, Shape]]:
    """The matrices of an expert, by the module of its layer's experts and their names."""
    modules: dict[str, dict[str, Shape]] = {}
    for name, shape in family_of(spec).base_shapes(spec).items():
        module, first, own = name.partition(".experts.0.")
        if first and len(shape) == 2:
            modules.setdefault(f"{module}.experts", {})[own] = shape
    return modules
