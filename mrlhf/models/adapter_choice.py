"""The adapters that a configuration, or a directory of peft, gives a model; and what it refuses.

This file does not know what is in the files of adapters.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mrlhf.config.sections import ALL_LINEAR, AdaptedSection, LoraSection, RoleSection
from mrlhf.errors import ConfigError
from mrlhf.models.adapter_files import EXPERTS, stored_lora
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.freezing import check_frozen_tensors, with_frozen
from mrlhf.models.lora import A, weight_of
from mrlhf.models.spec import Head, Lora, ModelSpec


def spec_of_role(section: RoleSection, head: Head) -> ModelSpec:
    """Return a section's model; raises as `load_spec` and `trained_spec`."""
    spec = load_spec(section.path, head)
    if not isinstance(section, AdaptedSection):
        return spec
    return trained_spec(spec, section.lora, section.freeze)


def trained_spec(spec: ModelSpec, lora: LoraSection, freeze: Sequence[str]) -> ModelSpec:
    """Return the model with what a section says of it; raises as `with_frozen` and `with_lora`."""
    chosen = with_lora(with_frozen(spec, freeze), lora)
    if freeze:
        check_frozen_tensors(chosen)
    return chosen


def with_lora(spec: ModelSpec, section: LoraSection) -> ModelSpec:
    """Return the model with the adapters that a section asks for, if it asks for any.

    A layer with a frozen matrix has none.

    Raises:
        ConfigError: a name of a layer is not one of the model's; or `path` holds no adapter of
            peft, or one of another model or kind.
    """
    if section.path is not None:
        return with_stored_lora(spec, section.path)
    if not section.rank:
        return spec

    targets = section.target_modules
    layers = family_of(spec).linear_layers(spec)
    shapes = family_of(spec).base_shapes(spec)
    frozen = [layer for layer in layers if weight_of(layer, shapes) in spec.frozen]
    lora = Lora(
        rank=section.rank,
        alpha=section.alpha,
        targets=None if ALL_LINEAR in targets else frozenset(targets),
        excluded=frozenset(section.exclude_modules).union(frozen),
        rank_stabilised=section.use_rslora,
    )
    _check_names("target_modules", lora.targets or frozenset(), layers)
    _check_names("exclude_modules", frozenset(section.exclude_modules), layers)

    adapted = replace(spec, lora=lora)
    _check_rank(adapted)
    _check_experts(f"lora.{'exclude' if lora.excluded else 'target'}_modules", adapted)
    return adapted


def with_stored_lora(spec: ModelSpec, path: str | Path) -> ModelSpec:
    """Return the model with the adapters in a directory of peft; raises as `with_lora`."""
    lora = stored_lora(Path(path), spec)
    adapted = replace(spec, lora=lora)
    shapes = family_of(spec).base_shapes(spec)
    for layer in family_of(spec).linear_layers(spec):
        weight = weight_of(layer, shapes)
        if lora.adapts(layer) and weight in spec.frozen:
            raise ConfigError(
                f"freeze holds {weight}, and the adapter in lora.path is of that layer too; "
                "leave the layer out of freeze, or merge the adapter first"
            )
    _check_experts(str(path), adapted)
    return adapted


def _check_names(key: str, names: frozenset[str], layers: Sequence[str]) -> None:
    """Raise a ConfigError for a name that is not that of a layer, or its end."""
    known: set[str] = set()
    for layer in layers:
        parts = layer.split(".")
        known |= {".".join(parts[first:]) for first in range(len(parts))}
    for name in sorted(names - known):
        last = sorted({layer.rpartition(".")[2] for layer in layers})
        near = difflib.get_close_matches(name, [*last, *known], n=1)
        hint = f"did you mean '{near[0]}'? They" if near else "they"
        raise ConfigError(
            f"lora.{key} names '{name}', and no linear layer of the model is called so; {hint} are "
            f"{', '.join(last)} (embeddings and output layers have no adapters)"
        )


def _check_rank(spec: ModelSpec) -> None:
    """Raise a ConfigError if no layer has an adapter, or a rank is above a layer's size."""
    family = family_of(spec)
    shapes = family.base_shapes(spec)
    factors = [name for name in family.tensor_shapes(spec) if name.endswith(A)]
    if not factors:
        raise ConfigError(
            "lora.exclude_modules and freeze leave no layer with an adapter; name fewer"
        )

    assert spec.lora is not None
    for name in factors:
        layer = name.removesuffix(A)
        rank = spec.lora.rank_of(layer)
        smallest = min(shapes[weight_of(layer, shapes)])
        if rank > smallest:
            raise ConfigError(
                f"lora.rank {rank} is above {smallest}, the smaller dimension of {layer}; use at "
                f"most {smallest}"
            )


def _check_experts(source: str, spec: ModelSpec) -> None:
    """Raise a ConfigError if experts of one mixture have different adapters, or only some have."""
    lora = spec.lora
    assert lora is not None
    first: dict[str, tuple[str, object]] = {}
    for layer in family_of(spec).linear_layers(spec):
        mixture, _, own = layer.partition(EXPERTS)
        if own:
            kind = (lora.rank_of(layer), lora.scale_of(layer)) if lora.adapts(layer) else None
            other, wanted = first.setdefault(f"{mixture} {own.partition('.')[2]}", (layer, kind))
            if kind != wanted:
                raise ConfigError(
                    f"{source}: the adapters of {other} and {layer} differ in rank or scale, or "
                    "only one has an adapter; those of all experts of a layer must be alike"
                )
