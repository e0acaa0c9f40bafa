"""Reads the weights of one model from our training checkpoints, one tensor at a time.

A checkpoint of a run holds several models, and optimizer states. Of a model with adapters it holds
these alone, and no frozen weights; the rest is where the run's configuration says. It is read in
one process, whatever the layout of the ranks that saved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource
from mrlhf.checkpoint.conversion.model_source import (
    Description,
    ModelSource,
    TensorForm,
    TrackedSource,
    dtype_within,
)
from mrlhf.checkpoint.frozen import check_frozen, fingerprint, fingerprint_of_start
from mrlhf.checkpoint.manifest import WEIGHT, Manifest, StoredModel, check_sizes, read_manifest
from mrlhf.checkpoint.slice_reader import SliceReader, check_shapes
from mrlhf.config.sections import LoraSection
from mrlhf.data.tokenizer import Tokenizer, holds_tokenizer, load_tokenizer
from mrlhf.data.tokenizer_files import copy_files
from mrlhf.errors import CheckpointError, ConfigError, DataError
from mrlhf.models.adapter_choice import trained_spec
from mrlhf.models.adapter_files import written_lora, written_ratios
from mrlhf.models.families import family_of, spec_of
from mrlhf.models.lora import is_adapter, trained_shapes
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.weights.boxes import whole

_POLICIES = ("actor", "model")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainingSource(ModelSource):
    """The weights of one model of a training checkpoint, or its adapters and head."""

    def __init__(
        self, directory: Path, role: str | None, assets: Path | None, base: Path | None = None
    ) -> None:
        """Read the manifest.

        Args:
            role: the model's name in the checkpoint; None for the only one, or the actor.
            assets: a directory with the tokenizer; None for the run's, with its chat template.
            base: the base of adapters; None for the one that the run's configuration names.

        Raises:
            CheckpointError: the checkpoint is not whole, or has no such model, or the base has
                other weights than the run began with.
            ConfigError, WeightError: the base of adapters is not there or not supported.
            DataError: the run's chat template is no longer there.
        """
        manifest = read_manifest(directory)
        check_sizes(directory, manifest.files)
        self._role = _pick_role(directory, manifest, role)
        model = manifest.models[self._role]
        if model.dtype not in _DTYPES:
            raise CheckpointError(f"a stored model has the dtype {model.dtype!r}, which is unknown")
        self.assets = assets
        self._path = Path(manifest.config.get(self._role, {}).get("path", ""))
        self._tokenizer = _tokenizer(directory, manifest.config) if assets is None else None
        self.spec = _as_trained(model_spec(model), directory, manifest, self._role)
        self.dtype = _DTYPES[model.dtype]

        family = family_of(self.spec)
        every = family.tensor_shapes(self.spec)
        trained = trained_shapes(every, self.spec, family.scalar_head)
        check_shapes(directory, self._role, model, trained)
        shapes = every if self.spec.lora is None else trained
        # Main weights are stored in float32; a model is used in the dtype of its parameters.
        self.tensors = {}
        for name, shape in shapes.items():
            self.tensors[name] = TensorForm(shape, dtype_within(self.spec, name, self.dtype))
        self._reader = SliceReader(directory, manifest)
        self.description = self._describe(manifest)
        self._ratios: dict[str, float] = {}
        if self.spec.lora is not None:
            self._ratios = written_ratios(self.spec)
            self.spec = replace(self.spec, lora=written_lora(self.spec))
            self.base = self._open_base(directory, manifest, base)
        self._kept: ModelSource | None = None  # holds the frozen weights of a whole model
        if self.spec.lora is None and self.spec.frozen:
            self._kept = self._open_base(directory, manifest, base)

    def read(self, name: str) -> Tensor:
        """One tensor, in its dtype in the model."""
        if self._kept is not None and name in self.spec.frozen:
            return self._kept.read(name)
        form = self.tensors[name]
        box = whole(name, form.shape)
        tensor = self._reader.read(self._role, WEIGHT, box).to(form.dtype).contiguous()
        return tensor * self._ratios[name] if name in self._ratios else tensor

    def write_assets(self, directory: Path) -> None:
        """Write them as the run exports them."""
        if self._tokenizer is None:
            return super().write_assets(directory)
        self._tokenizer.save_pretrained(directory, self.spec.pad_id)
        if self.spec.head == "lm":
            copy_files(self._path, directory, ("generation_config.json",))

    def _open_base(self, directory: Path, manifest: Manifest, base: Path | None) -> ModelSource:
        """The base in the dtype in which the run held it, if it is the one of the run."""
        path = base or self._path
        if not path.is_dir():
            raise ConfigError(
                f"{directory}: the base of its weights, {path}, is no directory here; name it "
                "with --base"
            )
        check_frozen(manifest.frozen, {self._role: fingerprint(path)})
        head: Head | None = "scalar" if self.spec.head == "scalar" else None
        source = HuggingFaceSource(path, head=head, labels=self.spec.labels)
        return TrackedSource(source, self.dtype, lambda nbytes: None)

    def _describe(self, manifest: Manifest) -> Description:
        left_out = []
        others = [role for role in manifest.models if role != self._role]
        if others:
            left_out.append(f"other models: {', '.join(others)}")
        moments = [kind for kind in manifest.models[self._role].kinds if kind != WEIGHT]
        if moments:
            left_out.append(f"optimizer state of {self._role}: {', '.join(moments)}")
        left_out.append("the state of the run: schedules, sampler, counters, random numbers")
        return Description(f"training checkpoint ({self._role})", manifest.step, left_out)


def _tokenizer(checkpoint: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The run's tokenizer with its chat template, if its files are still there."""
    data = config.get("data", {})
    template = data.get("chat_template")
    paths = [data.get("tokenizer"), *(config.get(name, {}).get("path") for name in _POLICIES)]
    there = [
        path for path in paths if path and (Path(path).is_file() or holds_tokenizer(Path(path)))
    ]
    if there and template is not None and not Path(template).is_file():
        raise DataError(
            f"{checkpoint}: the run's data.chat_template, {template}, is not there; put it back, "
            "or name a model with the tokenizer and the template with --like"
        )
    return load_tokenizer(there[0], template) if there else None


def _pick_role(directory: Path, manifest: Manifest, role: str | None) -> str:
    """Choose the model of a checkpoint; CheckpointError if that is not possible."""
    roles = list(manifest.models)
    if role is None and len(roles) == 1:
        return roles[0]
    if role is None and "actor" in roles:
        return "actor"
    if role not in roles:
        asked = "several models" if role is None else f"no model {role!r}"
        raise CheckpointError(f"{directory} has {asked}; name one with --role: {', '.join(roles)}")
    return role


def _as_trained(spec: ModelSpec, directory: Path, manifest: Manifest, role: str) -> ModelSpec:
    """The model as the run's configuration trains it, with adapters if the checkpoint has any."""
    freeze = manifest.config.get(role, {}).get("freeze", [])
    if not any(map(is_adapter, manifest.models[role].tensors)):
        return trained_spec(spec, LoraSection(), freeze)
    try:
        section = LoraSection(**manifest.config[role]["lora"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory} holds adapters, and its configuration does not say how {role} uses them"
        ) from error
    check_frozen(manifest.frozen, {f"{role}.lora": fingerprint_of_start(section)})
    return trained_spec(spec, section, freeze)


def model_spec(model: StoredModel) -> ModelSpec:
    """The spec of a stored model."""
    if model.head not in ("lm", "scalar"):
        raise CheckpointError(f"a stored model has the head {model.head!r}, which is unknown")
    return spec_of(model.hf_config, "lm" if model.head == "lm" else "scalar")
