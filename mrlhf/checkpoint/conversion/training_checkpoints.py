"""Reads the weights of one model from our training checkpoints, one tensor at a time.

A checkpoint of a run holds several models, and optimizer states. It is read in one process,
whatever the layout of the ranks that saved it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.model_source import (
    Description,
    ModelSource,
    TensorForm,
    dtype_within,
)
from mrlhf.checkpoint.manifest import WEIGHT, Manifest, StoredModel, check_sizes, read_manifest
from mrlhf.checkpoint.slice_reader import SliceReader, check_shapes
from mrlhf.errors import CheckpointError
from mrlhf.models.families import family_of, spec_of
from mrlhf.models.lora import is_adapter
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.boxes import whole

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainingSource(ModelSource):
    """The weights of one model of a training checkpoint."""

    def __init__(self, directory: Path, role: str | None, assets: Path | None) -> None:
        """Read the manifest.

        Args:
            role: the model's name in the checkpoint; None for the only one, or the actor.
            assets: a directory with the tokenizer, if there is one.

        Raises:
            CheckpointError: the checkpoint is not whole, or has no such model.
        """
        manifest = read_manifest(directory)
        check_sizes(directory, manifest.files)
        self._role = pick_role(directory, manifest, role)
        model = manifest.models[self._role]
        if model.dtype not in _DTYPES:
            raise CheckpointError(f"a stored model has the dtype {model.dtype!r}, which is unknown")
        self.assets = assets
        self.spec = model_spec(model)
        self.dtype = _DTYPES[model.dtype]

        shapes = family_of(self.spec).tensor_shapes(self.spec)
        check_shapes(directory, self._role, model, shapes)
        # Main weights are stored in float32; a model is used in the dtype of its parameters.
        self.tensors = {}
        for name, shape in shapes.items():
            self.tensors[name] = TensorForm(shape, dtype_within(self.spec, name, self.dtype))
        self._reader = SliceReader(directory, manifest)
        self.description = self._describe(manifest)

    def read(self, name: str) -> Tensor:
        """One tensor, in its dtype in the model."""
        form = self.tensors[name]
        box = whole(name, form.shape)
        return self._reader.read(self._role, WEIGHT, box).to(form.dtype).contiguous()

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


def pick_role(directory: Path, manifest: Manifest, role: str | None) -> str:
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


def holds_adapters(directory: Path, role: str | None) -> bool:
    """Whether the chosen model of a training checkpoint is an adapter; raises as `pick_role`."""
    manifest = read_manifest(directory)
    return any(map(is_adapter, manifest.models[pick_role(directory, manifest, role)].tensors))


def model_spec(model: StoredModel) -> ModelSpec:
    """The spec of a stored model."""
    if model.head not in ("lm", "scalar"):
        raise CheckpointError(f"a stored model has the head {model.head!r}, which is unknown")
    return spec_of(model.hf_config, "lm" if model.head == "lm" else "scalar")
