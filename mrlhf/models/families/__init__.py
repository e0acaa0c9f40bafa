"""The model families that mrlhf knows, and the one reader and writer of `config.json`.

A new family is a file of its own, and is listed in `FAMILIES`. This file does not know layouts or
ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError, WeightError
from mrlhf.models.families.base import Chunk, Family
from mrlhf.models.families.deepseek_v3 import DEEPSEEK_V3
from mrlhf.models.families.gemma2 import GEMMA2
from mrlhf.models.families.gemma3 import GEMMA3
from mrlhf.models.families.gemma4 import GEMMA4
from mrlhf.models.families.glm4_moe import GLM4_MOE
from mrlhf.models.families.glm4_moe_lite import GLM4_MOE_LITE
from mrlhf.models.families.gpt_oss import GPT_OSS
from mrlhf.models.families.granite import GRANITE
from mrlhf.models.families.llama import LLAMA
from mrlhf.models.families.ministral import MINISTRAL
from mrlhf.models.families.mistral import MISTRAL
from mrlhf.models.families.mixtral import MIXTRAL
from mrlhf.models.families.olmo2 import OLMO2
from mrlhf.models.families.olmo3 import OLMO3
from mrlhf.models.families.phi3 import PHI3
from mrlhf.models.families.qwen2 import QWEN2
from mrlhf.models.families.qwen2_moe import QWEN2_MOE
from mrlhf.models.families.qwen3 import QWEN3
from mrlhf.models.families.qwen3_5 import QWEN3_5
from mrlhf.models.families.qwen3_5_moe import QWEN3_5_MOE
from mrlhf.models.families.qwen3_moe import QWEN3_MOE
from mrlhf.models.families.qwen3_next import QWEN3_NEXT
from mrlhf.models.families.seed_oss import SEED_OSS
from mrlhf.models.families.smollm3 import SMOLLM3
from mrlhf.models.families.sparse_latents import DEEPSEEK_V32, GLM_MOE_DSA
from mrlhf.models.families.values import check_values
from mrlhf.models.published import how_to_get
from mrlhf.models.rope import keys_of_transformers_4
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.weights.stored import are_equal, model_name, survey

__all__ = [
    "FAMILIES",
    "Chunk",
    "Family",
    "family_of",
    "load_spec",
    "save_config",
    "spec_of",
    "stated_spec",
    "with_labels",
]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(GEMMA2, GEMMA3, GEMMA4, GRANITE, LLAMA, MINISTRAL, MISTRAL),
        *(OLMO2, OLMO3, PHI3, QWEN2, QWEN3, QWEN3_5, SEED_OSS, SMOLLM3),
        *(DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA, GPT_OSS),
        *(MIXTRAL, QWEN2_MOE, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT),
    )
}

_RENAMED = {name: family for family in FAMILIES.values() for name in family.renamed}
_WRAPPED = {family.wrapper: family for family in FAMILIES.values() if family.wrapper is not None}

_MOST_PARAMETERS = 10**13
# Keys that say nothing about the model: names of code, and how its files store the weights.
_OF_FILES = ("auto_map", "custom_pipelines", "quantization_config")
# How the names of classes end whose `score` has a row for each label.
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
# Keys that a model which also reads images states beside its parts, and not in each.
_OF_ALL_PARTS = (
    *("dtype", "torch_dtype", "transformers_weights"),
    *("quantization_config", "compression_config"),
)


def family_of(spec: ModelSpec) -> Family:
    """The family of a model."""
    return FAMILIES[spec.family]


def load_spec(path: str | Path, head: Head) -> ModelSpec:
    """The spec of the model in directory `path`; code that stands beside the files is never run.

    Raises:
        ConfigError: there is no `config.json`, it does not describe a model, or its family or a
            feature of it is not supported.
    """
    spec = stated_spec(path, head)
    # An output layer that differs from the embedding is the model's own, as in transformers.
    if spec.output_is_embedding and stores_own_output(path, spec):
        return spec_of({**spec.hf_config, "tie_word_embeddings": False}, head)
    return spec


def stated_spec(path: str | Path, head: Head) -> ModelSpec:
    """The spec of the model in `path` by its `config.json` alone; raises as `load_spec`."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{path}: no config.json there; give the directory of a Hugging Face model"
            f"{how_to_get(str(path), file.name)}"
        )
    stated = read_object(file, ConfigError)
    family = _stated_family(file, stated)
    if stated["model_type"] == family.wrapper:
        stated = _language_model(file, stated, family)
    stated = {**stated, "model_type": family.model_type}
    for key in family.required_keys:
        if all(stated.get(name) is None for name in key.split(" or ")):
            raise ConfigError(f"{file}: no {key}; a {family.model_type} model must state it")

    try:
        check_values(stated, family.quantisations)
        config = _completed(stated)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None

    try:
        spec = _read(config, head)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{file}: no {error.args[0]}") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file}: a value cannot be used: {reason}") from error
    _check_size(file, spec)
    return spec


def _check_size(file: Path, spec: ModelSpec) -> None:
    """Raise a ConfigError for sizes that would only fail when memory runs out."""
    shapes = family_of(spec).tensor_shapes(spec)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    if parameters > _MOST_PARAMETERS:
        raise ConfigError(
            f"{file}: the sizes make {parameters:.0e} parameters, which is more than any model has"
        )


def stores_own_output(path: str | Path, spec: ModelSpec) -> bool:
    """Whether the files in `path` hold an output layer that differs from the embedding.

    transformers does not tie the two then, whatever `config.json` says. Files that cannot be read
    are refused elsewhere.
    """
    family = family_of(spec)
    try:
        known = (family.embedding, family.language_head)
        tensors = {model_name(own, known): held for own, held in survey(Path(path)).tensors.items()}
        embedding = tensors.get(family.embedding)
        output = tensors.get(family.language_head)
        if embedding is None or output is None:
            return False
        return not are_equal(embedding, output, _stated_dtype(spec))
    except WeightError:
        return False


def spec_of(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a `config.json` that is in no file; ConfigError if it is not supported."""
    if config.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"model_type {config.get('model_type')!r} is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return _read(_completed(config), head)


def _read(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of a completed `config.json`; a classifier's scalar head has its labels."""
    spec = FAMILIES[config["model_type"]].read_config(config, head)
    [kind, *_] = config.get("architectures") or [""]
    if head == "lm" or not str(kind).endswith(_CLASSIFIERS):
        return spec
    return replace(spec, labels=tuple(label for _, label in sorted(config["id2label"].items())))


def with_labels(spec: ModelSpec, labels: Sequence[str]) -> ModelSpec:
    """The scalar model with a number for each of `labels`; without them, with its only one."""
    if not labels:
        return spec
    id2label = dict(enumerate(labels))
    label2id = {label: number for number, label in id2label.items()}
    kinds = [family_of(spec).class_name("scalar")]
    named = {"id2label": id2label, "label2id": label2id, "architectures": kinds}
    return replace(spec, labels=tuple(labels), hf_config={**spec.hf_config, **named})


def save_config(spec: ModelSpec, directory: str | Path, dtype: torch.dtype) -> None:
    """Write the `config.json` that goes with exported weights of `dtype`.

    It has the keys of transformers 4 beside those of transformers 5. A scalar model becomes a
    sequence classifier, whose head transformers calls `score` too, with its labels or one.
    """
    config = AutoConfig.for_model(**spec.hf_config)
    config.dtype = dtype
    family = family_of(spec)
    config.architectures = [family.class_name(spec.head)]
    if spec.head == "scalar" and not spec.labels:
        config.num_labels = 1
    values = json.loads(config.to_json_string())
    rope = keys_of_transformers_4(spec, family.window_base_key)
    values |= {"torch_dtype": values["dtype"], **rope}
    for earlier, name in config.attribute_map.items():
        values[earlier] = values.get(name)
    text = json.dumps(values, indent=2, sort_keys=True)
    (Path(directory) / "config.json").write_text(text + "\n", encoding="utf-8")


def _completed(stated: dict[str, Any]) -> dict[str, Any]:
    """Complete a `config.json` as transformers does, without code; ConfigError if it refuses."""
    plain = {key: value for key, value in stated.items() if key not in _OF_FILES}
    # transformers takes a mistral with `layer_types` for a ministral.
    if plain["model_type"] == "mistral" and "layer_types" in plain:
        plain["model_type"] = "ministral"
    try:
        return AutoConfig.for_model(**plain).to_dict()
    except Exception as error:  # of many types, each with its own way to say that a value is wrong
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers refuses it: {reason}") from error


def _stated_dtype(spec: ModelSpec) -> torch.dtype | None:
    """The number format in which transformers would load the model, if `config.json` says it."""
    dtype = getattr(torch, str(spec.hf_config.get("dtype")).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _stated_family(file: Path, stated: dict[str, Any]) -> Family:
    model_type = stated.get("model_type")
    families = FAMILIES | _WRAPPED | _RENAMED
    supported = ", ".join(sorted(families))
    if model_type is None:
        raise ConfigError(f"{file}: no model_type; supported are {supported}")
    if not isinstance(model_type, str) or model_type not in families:
        raise ConfigError(
            f"{file}: model_type {model_type!r} is not supported; supported are {supported}"
        )
    return families[model_type]


def _language_model(file: Path, stated: dict[str, Any], family: Family) -> dict[str, Any]:
    """The `config.json` of the language model alone of one that also reads images."""
    own = stated.get("text_config")
    if not isinstance(own, dict):
        raise ConfigError(f"{file}: no text_config; a {family.wrapper} model must state it")
    model_type = own.get("model_type", family.model_type)
    if model_type not in (family.model_type, *family.renamed):
        raise ConfigError(
            f"{file}: text_config has model_type {model_type!r}; of a {family.wrapper} model only "
            f"{' and '.join((family.model_type, *family.renamed))} are supported"
        )
    of_files = {key: stated[key] for key in _OF_ALL_PARTS if key in stated}
    ties = {key: stated[key] for key in ("tie_word_embeddings",) if key in stated}
    return {**of_files, **own, **ties}
