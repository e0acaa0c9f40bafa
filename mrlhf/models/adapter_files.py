"""Adapters in files, as peft writes and reads them.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors have the
names of the model behind a prefix. A scalar head that was trained beside the adapters is one of
them. This file does not know ranks or roles.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrlhf.config.load import read_section
from mrlhf.config.sections import StoredAdapterSection
from mrlhf.data.hub import repository_of
from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError, WeightError
from mrlhf.models.adapter_stacks import joined_forms, joined_layers, joined_module, joins_experts
from mrlhf.models.families import family_of
from mrlhf.models.families.dense_weights import SCALAR_HEAD
from mrlhf.models.lora import A, B, is_adapter, trained_shapes
from mrlhf.models.spec import Lora, ModelSpec
from mrlhf.weights.forms import OtherForm
from mrlhf.weights.hf import FileOptions, read_tensors, write_weights
from mrlhf.weights.shard import Shape, Slot
from mrlhf.weights.stored import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ExpectedTensors,
    FileTensor,
    ModelFiles,
    first_three,
    match,
    read_headers,
)

CONFIG = ADAPTER_CONFIG
WEIGHTS = ADAPTER_WEIGHTS
PREFIX = "base_model.model."
EXPERTS = ".experts."
_ATTENTION = re.compile(r"\.self_attn\.")
_REPETITION = re.compile(r"(?<!\()[*+?{]")
_OF_GROUP = re.compile(r"\)[*+{]")

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
    "monteclora_config": (None,),
    # The others of peft change the base, so that the adapter is one of another base.
    "init_lora_weights": (False, "gaussian", "eva", "orthogonal", "mica", None, True),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "velora_config": (None,),
}


def read_adapter(path: str | Path, spec: ModelSpec, slots: Sequence[Slot]) -> bool:
    """Fill the slots of adapters, and of a scalar head, from a directory of peft.

    Returns whether it had a head; if not, the head's slots stay as they are. WeightError if files
    are missing, damaged or of another model.
    """
    directory = Path(path)
    expected = _expected(spec)
    named = _named_slots(slots, expected.shapes)
    return not read_tensors(_stored(directory), named, expected)


def write_adapter(
    path: str | Path, spec: ModelSpec, slots: Sequence[Slot], group: dist.ProcessGroup
) -> None:
    """Write adapters, and a scalar head, as `write_weights` writes a model; without the config."""
    shapes = _named_shapes(spec)
    options = FileOptions(max_shard_bytes=sys.maxsize, file=WEIGHTS, forms=adapter_forms(spec))
    ratios = written_ratios(spec)
    scaled = [
        replace(slot, parameter=slot.parameter.detach() * ratios[slot.piece.name])
        if slot.piece.name in ratios
        else slot
        for slot in slots
    ]
    write_weights(path, _named_slots(scaled, shapes), shapes, group, options)


def adapter_tensors(path: str | Path, spec: ModelSpec) -> dict[str, FileTensor]:
    """Where a directory stores each factor, by name without peft's prefix; as `read_adapter`."""
    tensors = match(_stored(Path(path)), _expected(spec))
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def check_adapter(path: str | Path, spec: ModelSpec) -> None:
    """Check by the file's header that it holds the model's adapters; raises as `read_adapter`."""
    read_adapter(path, spec, [])


def adapter_config(spec: ModelSpec, base: str) -> dict[str, Any]:
    """Return `adapter_config.json` of a model whose base is the directory `base`.

    transformers keeps the experts of a layer in two parameters, with gate and up as one, and peft
    adapts these as `target_parameters`. It would take names of MLP layers in `target_modules` for
    those of experts; so all of a mixture's MLPs and routers are named as parameters.
    """
    lora = written_lora(spec)
    family = family_of(spec)
    parameters = _parameters(spec)
    modules = _adapted(spec).difference(*parameters.values())
    ranks, alphas = _patterns(lora, parameters)
    is_scalar = spec.head == "scalar"
    saved = [family.scalar_head.removesuffix(".weight")]

    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scalar else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rank_stabilised,
        "target_modules": sorted(_ends(modules, spec)),
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": ranks | dict(lora.ranks),
        "alpha_pattern": alphas | dict(lora.alphas),
        "modules_to_save": saved if is_scalar and family.scalar_head not in spec.frozen else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def written_lora(spec: ModelSpec) -> Lora:
    """Return the adapters of a model as they are written.

    All have one scale if layers that peft joins have several, so factors B must be multiplied by
    the ratio of a layer's scale to the written one.
    """
    lora = spec.lora
    assert lora is not None, "a model without adapters"
    if all(len(set(map(lora.scale_of, layers))) == 1 for layers in _parameters(spec).values()):
        return lora
    unit = lora.alpha / lora.divisor(lora.rank)
    alphas = tuple((pattern, unit * lora.divisor(rank)) for pattern, rank in lora.ranks)
    return replace(lora, alphas=alphas)


def written_ratios(spec: ModelSpec) -> dict[str, float]:
    """Return by what factors B are multiplied when they are written, by their names."""
    lora = spec.lora
    written = written_lora(spec)
    if lora is None or written is lora:
        return {}
    return {layer + B: lora.scale_of(layer) / written.scale_of(layer) for layer in _adapted(spec)}


def _adapted(spec: ModelSpec) -> set[str]:
    names = family_of(spec).tensor_shapes(spec)
    return {name.removesuffix(A) for name in names if name.endswith(A)}


def _parameters(spec: ModelSpec) -> dict[str, list[str]]:
    """The layers with adapters of mixtures' MLPs and routers, by the parameter that holds them."""
    parameters: dict[str, list[str]] = {}
    if spec.experts is not None:
        for layer in sorted(layer for layer in _adapted(spec) if not _ATTENTION.search(layer)):
            parameters.setdefault(_parameter_of(layer), []).append(layer)
    return parameters


def _parameter_of(layer: str) -> str:
    """The parameter of transformers that holds the weight of a layer of an MLP, or a router."""
    name = layer.replace(".block_sparse_moe.", ".mlp.")
    mixture, experts, own = name.partition(EXPERTS)
    if not experts:
        return f"{name}.weight"
    is_second = own.endswith(("down_proj", ".w2"))
    return f"{mixture}{EXPERTS}{'down_proj' if is_second else 'gate_up_proj'}"


def _patterns(
    lora: Lora, parameters: Mapping[str, Sequence[str]]
) -> tuple[dict[str, int], dict[str, float]]:
    """The ranks and alphas of parameters where they differ from those of most, as peft counts.

    It joins the factors of gate and up of an expert: the rank is their sum, and the scale stays.
    """
    ranks = {}
    alphas = {}
    for parameter, layers in parameters.items():
        expert = layers[0].rpartition(".")[0]
        joined = [layer for layer in layers if layer.rpartition(".")[0] == expert]
        rank = sum(lora.rank_of(layer) for layer in joined)
        alpha = lora.scale_of(layers[0]) * lora.divisor(rank)
        if (rank, alpha) != (lora.rank, lora.alpha):
            ranks[re.escape(parameter)] = rank
            alphas[re.escape(parameter)] = alpha
    return ranks, alphas


def write_adapter_config(spec: ModelSpec, base: str, directory: Path) -> None:
    """Write `adapter_config.json` into a directory; a base in the cache is named as on the hub."""
    found = repository_of(base)
    stated = adapter_config(spec, base if found is None else found[0])
    stated |= {} if found is None else {"revision": found[1]}
    text = json.dumps(stated, indent=2)  # the first pattern that fits counts
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def adapter_forms(spec: ModelSpec) -> dict[str, OtherForm]:
    """The tensors of such a file that hold several of the model's factors."""
    if not joins_experts(spec):
        return {}
    return {
        PREFIX + name: replace(form, parts={PREFIX + own: part for own, part in form.parts.items()})
        for name, form in joined_forms(spec).items()
    }


def _expected(spec: ModelSpec) -> ExpectedTensors:
    head = PREFIX + family_of(spec).scalar_head
    return ExpectedTensors(_named_shapes(spec), may_lack=(head,), other_forms=adapter_forms(spec))


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


def stored_lora(directory: Path, spec: ModelSpec) -> Lora:
    """Return the adapters that a directory of peft holds for the model.

    Raises:
        ConfigError: it holds no adapter of peft, or one of another model or kind.
    """
    file = directory / CONFIG
    if not file.is_file():
        raise ConfigError(f"{directory}: no {CONFIG} there; give a directory that peft has written")
    config = read_object(file, ConfigError)
    settings = read_section(StoredAdapterSection, config, file)
    for key, allowed in _PLAIN.items():
        if config.get(key, allowed[-1]) not in allowed:
            raise ConfigError(
                f"{file}: {key} is {config[key]!r}; only plain LoRA adapters are supported"
            )
    head = family_of(spec).scalar_head.removesuffix(".weight")
    # peft names heads of other models too; only what is in the file counts.
    stored = _stored(directory).tensors
    saved = set(settings.modules_to_save) - {head}
    others = {module for module in saved if any(f".{module}." in name for name in stored)}
    if others:
        raise ConfigError(
            f"{file}: modules_to_save names {first_three(sorted(others))}; beside adapters only "
            f"the head {head} of a scalar model can be trained"
        )

    layers = _layers_in(directory, {name: each.shape for name, each in stored.items()}, spec)
    unknown = sorted(layers - set(family_of(spec).linear_layers(spec)))
    if unknown or not layers:
        raise ConfigError(
            f"{directory}: has an adapter of {first_three(unknown) or 'no layer'}, and the base, a "
            f"{spec.family}, has no such linear layer; give the adapter of this base"
        )
    for key in ("target_modules", "exclude_modules"):
        if isinstance(settings.value_of(key), str):  # not matched, since the tensors name layers
            _check_pattern(f"{file}: {key}", settings.value_of(key), is_matched=False)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in settings.value_of(key):
            _check_pattern(f"{file}: {key}", pattern, is_matched=True)
    return Lora(
        rank=settings.r,
        alpha=settings.lora_alpha,
        targets=_ends(layers, spec),
        rank_stabilised=settings.use_rslora,
        ranks=tuple(settings.rank_pattern.items()),
        alphas=tuple(settings.alpha_pattern.items()),
        joins_experts=joins_experts(spec),
    )


def stored_labels(directory: Path) -> list[str]:
    """Labels for several rows of a head in a directory of peft, which names none."""
    head = _stored(directory).tensors.get(PREFIX + SCALAR_HEAD)
    rows = 1 if head is None else head.shape[0]
    return [] if rows == 1 else [f"LABEL_{row}" for row in range(rows)]


def _layers_in(directory: Path, stored: Mapping[str, Shape], spec: ModelSpec) -> set[str]:
    """The linear layers of which a directory has factors; `stored` are its tensors' shapes."""
    plain_shapes = {name.removeprefix(PREFIX): shape for name, shape in stored.items()}
    layers = set(joined_layers(plain_shapes, spec)) if joins_experts(spec) else set()
    for name in stored:
        plain = name.removeprefix(PREFIX)
        module = joined_module(plain)
        if module is not None and any(layer.startswith(f"{module}.") for layer in layers):
            continue
        if module is not None and not joins_experts(spec):
            raise ConfigError(
                f"{directory}: {name} is of all experts of a layer at once, as peft saves them "
                "with transformers 5; only a pair for each expert and projection is read, as peft "
                "saves them with transformers 4 and mrlhf always: cut the tensors so"
            )
        if is_adapter(plain):
            layers.add(plain.removesuffix(A).removesuffix(B))
    return layers


def _ends(layers: set[str], spec: ModelSpec) -> frozenset[str]:
    """The last parts of the names of `layers`; or all of the names, if others end so too."""
    last = frozenset(layer.rpartition(".")[2] for layer in layers)
    every = family_of(spec).linear_layers(spec)
    named = {layer for layer in every if layer.rpartition(".")[2] in last}
    return last if named == layers else frozenset(layers)


def _check_pattern(where: str, pattern: str, is_matched: bool) -> None:
    """Refuse a regular expression that is broken or, if it `is_matched`, may have no end."""
    problem = ""
    repetitions = len(_REPETITION.findall(pattern))
    if is_matched and (repetitions > 3 or pattern.count("(") > 4 or _OF_GROUP.search(pattern)):
        problem = "may take for ever; repeat no group, and at most three characters"
    try:
        re.compile(rf"(.*\.)?({pattern})$" if is_matched else pattern)  # as peft uses it
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"is broken: {error}"
    if problem:
        raise ConfigError(f"{where}: the regular expression {repr(pattern)[:100]} {problem}")


def _stored(directory: Path) -> ModelFiles:
    file = directory / WEIGHTS
    if not file.is_file():
        raise WeightError(f"{directory}: no {WEIGHTS}; save the adapter anew with save_pretrained")
    return read_headers(directory, [file])
