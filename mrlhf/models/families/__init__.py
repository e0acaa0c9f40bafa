"""The model families that mrlhf knows, by Hugging Face `model_type`, and the door through which a
spec is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from mrlhf.errors import ConfigError
from mrlhf.models.families import llama, mistral, qwen2, qwen3
from mrlhf.models.families.llama import rule_of, tensor_shapes
from mrlhf.models.spec import Head, ModelSpec

__all__ = ["FAMILIES", "load_spec", "rule_of", "save_config", "tensor_shapes"]

FAMILIES: dict[str, Callable[[dict[str, Any], Head], ModelSpec]] = {
    "llama": llama.read_config,
    "mistral": mistral.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}


def load_spec(path: str | Path, head: Head) -> ModelSpec:
    """The spec of the model in directory `path`, from its `config.json`.

    Raises:
        ConfigError: there is no `config.json`, or its family or a feature of it is not supported.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{path}: no config.json there; give the directory of a Hugging Face model"
        )
    config = AutoConfig.from_pretrained(path).to_dict()
    if config["model_type"] not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"{path}: model_type {config['model_type']!r} is not supported; supported are {known}"
        )
    return FAMILIES[config["model_type"]](config, head)


def save_config(
    spec: ModelSpec, directory: str | Path, dtype: torch.dtype, pad_token_id: int
) -> None:
    """Write the `config.json` that goes with exported weights of `dtype`.

    A scalar model becomes a sequence classifier with one label, whose head transformers calls
    `score` too.
    """
    config = AutoConfig.for_model(**spec.hf_config)
    config.dtype = dtype
    if spec.head == "scalar":
        stem = (
            config.architectures[0].split("For")[0]
            if config.architectures
            else type(config).__name__[: -len("Config")]
        )
        config.architectures = [f"{stem}ForSequenceClassification"]
        config.num_labels = 1
        config.pad_token_id = pad_token_id
    config.save_pretrained(directory)
