"""Adapters in files, as peft writes and reads them.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors have the
names of the model behind a prefix. A scalar head that was trained beside the adapters is one of
them. This file does not know ranks or roles.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrlhf.config.sections import ALL_LINEAR, AdaptedSection, LoraSection, RoleSection
from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError, WeightError
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.lora import A, B, is_adapter, trained_shapes
from mrlhf.models.spec import Head, Lora, ModelSpec
from mrlhf.weights.hf import FileOptions, read_tensors, write_weights
from mrlhf.weights.shard import Shape, Slot
from mrlhf.weights.stored import ExpectedTensors, ModelFiles, first_three, read_headers

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

# Keys of `adapter_config.json`. With another value, a layer is not W x + scale * B A x.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "velora_config": (None,),
}


def spec_of_role(section: RoleSection, head: Head) -> ModelSpec:
    """Return the model of a section, with its adapters if it is trained with some.

    Raises:
        ConfigError: the model is not supported, or as for `with_lora`.
    """
    spec = load_spec(section.path, head)
    return with_lora(spec, section.lora) if isinstance(section, AdaptedSection) else spec


def with_lora(spec: ModelSpec, section: LoraSection) -> ModelSpec:
    """Return the model with the adapters that a section asks for, if it asks for any.

    Raises:
        ConfigError: a name of a layer is not one of the model's; or `path` holds no adapter of
            peft, or one of another model or kind.
    """
    if section.path is not None:
        return replace(spec, lora=_stored_lora(Path(section.path), spec))
    if not section.rank:
        return spec
    targets = section.target_modules
    lora = Lora(
        rank=section.rank,
        alpha=section.alpha,
        targets=None if ALL_LINEAR in targets else frozenset(targets),
        excluded=frozenset(section.exclude_modules),
        rank_stabilised=section.use_rslora,
    )
    layers = family_of(spec).linear_layers(spec)
    _check_names("target_modules", lora.targets or frozenset(), layers)
    _check_names("exclude_modules", lora.excluded, layers)
    adapted = replace(spec, lora=lora)
    _check_rank(adapted)
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
        raise ConfigError("lora.exclude_modules leaves no layer with an adapter; name fewer")
    assert spec.lora is not None
    for name in factors:
        layer = name.removesuffix(A)
        rank = spec.lora.rank_of(layer)
        smallest = min(shapes[f"{layer}.weight"])
        if rank > smallest:
            raise ConfigError(
                f"lora.rank {rank} is above {smallest}, the smaller dimension of {layer}; use at "
                f"most {smallest}"
            )


def read_adapter(path: str | Path, spec: ModelSpec, slots: Sequence[Slot]) -> bool:
    """Fill the slots of adapters, and of a scalar head, from a directory of peft.

    Returns:
        Whether the directory had a head; if not, its slots stay as they are.

    Raises:
        WeightError: the files are missing, damaged or of another model.
    """
    directory = Path(path)
    shapes = _named_shapes(spec)
    expected = ExpectedTensors(shapes, may_lack=(PREFIX + family_of(spec).scalar_head,))
    return not read_tensors(_stored(directory), _named_slots(slots, shapes), expected)


def write_adapter(
    path: str | Path, spec: ModelSpec, slots: Sequence[Slot], group: dist.ProcessGroup
) -> None:
    """Write adapters, and a scalar head, as `write_weights` writes a model; without the config."""
    shapes = _named_shapes(spec)
    options = FileOptions(max_shard_bytes=sys.maxsize, file=WEIGHTS)
    write_weights(path, _named_slots(slots, shapes), shapes, group, options)


def check_adapter(path: str | Path, spec: ModelSpec) -> None:
    """Check by the header of the file that a directory holds the model's adapters.

    Raises:
        WeightError: as `read_adapter`.
    """
    read_adapter(path, spec, [])


def adapter_config(spec: ModelSpec, base: str) -> dict[str, Any]:
    """Return `adapter_config.json` of a model whose base is the directory `base`."""
    lora = spec.lora
    assert lora is not None, "a model without adapters"
    family = family_of(spec)
    layers = {name.removesuffix(A) for name in family.tensor_shapes(spec) if name.endswith(A)}
    is_scalar = spec.head == "scalar"
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scalar else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rank_stabilised,
        "target_modules": sorted(_ends(layers, spec)),
        "rank_pattern": dict(lora.ranks),
        "alpha_pattern": dict(lora.alphas),
        "modules_to_save": [family.scalar_head.removesuffix(".weight")] if is_scalar else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def write_adapter_config(spec: ModelSpec, base: str, directory: Path) -> None:
    """Write `adapter_config.json` into a directory."""
    text = json.dumps(adapter_config(spec, base), indent=2, sort_keys=True)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def _named_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The tensors of the file of the model's adapters."""
    family = family_of(spec)
    shapes = trained_shapes(family.tensor_shapes(spec), spec, family.scalar_head)
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _named_slots(slots: Sequence[Slot], shapes: Mapping[str, Shape]) -> list[Slot]:
    """Those of the slots that are in such a file, under their names there."""
    renamed = [slot.piece._replace(name=PREFIX + slot.piece.name) for slot in slots]
    pairs = zip(slots, renamed, strict=True)
    return [replace(slot, piece=piece) for slot, piece in pairs if piece.name in shapes]


def _stored_lora(directory: Path, spec: ModelSpec) -> Lora:
    """Return the adapters that a directory of peft holds for the model."""
    file = directory / CONFIG
    if not file.is_file():
        raise ConfigError(f"{directory}: no {CONFIG} there; give a directory that peft has written")
    config = read_object(file, ConfigError)
    for key, allowed in _PLAIN.items():
        if config.get(key, allowed[-1]) not in allowed:
            raise ConfigError(
                f"{file}: {key} is {config[key]!r}; only plain LoRA adapters are supported"
            )
    head = family_of(spec).scalar_head.removesuffix(".weight")
    others = set(config.get("modules_to_save") or ()) - {head}
    if others:
        raise ConfigError(
            f"{file}: modules_to_save names {first_three(sorted(others))}; beside adapters only "
            f"the head {head} of a scalar model can be trained"
        )

    try:
        return Lora(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            targets=_ends(_layers_in(directory), spec),
            rank_stabilised=bool(config.get("use_rslora")),
            ranks=_numbers(config.get("rank_pattern")),
            alphas=_numbers(config.get("alpha_pattern")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: r, lora_alpha or a pattern cannot be used: {error}") from error


def _layers_in(directory: Path) -> set[str]:
    """The linear layers of which a directory has factors."""
    layers = set()
    for name in _stored(directory).tensors:
        plain = name.removeprefix(PREFIX)
        if is_adapter(plain):
            layers.add(plain.removesuffix(A).removesuffix(B))
    return layers


def _ends(layers: set[str], spec: ModelSpec) -> frozenset[str]:
    """The last parts of the names of `layers`; or all of the names, if others end so too."""
    last = frozenset(layer.rpartition(".")[2] for layer in layers)
    every = family_of(spec).linear_layers(spec)
    named = {layer for layer in every if layer.rpartition(".")[2] in last}
    return last if named == layers else frozenset(layers)


def _numbers(patterns: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((patterns or {}).items())


def _stored(directory: Path) -> ModelFiles:
    file = directory / WEIGHTS
    if not file.is_file():
        raise WeightError(f"{directory}: no {WEIGHTS}; save the adapter anew with save_pretrained")
    return read_headers(directory, [file])
