"""A small training checkpoint without a run: the weights of a Hugging Face model, and no state."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource
from mrlhf.checkpoint.manifest import (
    MANIFEST,
    WEIGHT,
    Manifest,
    StoredModel,
    StoredTensor,
    slice_key,
)
from mrlhf.checkpoint.state_tree import StateCopy
from mrlhf.checkpoint.tensor_file import TensorSource, write_bytes, write_tensors
from mrlhf.weights.boxes import whole


def save_training(
    model: Path,
    directory: Path,
    *,
    role: str = "actor",
    step: int = 0,
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """Save the weights as one rank does; `dtype`, if given, is that of the model's parameters.

    `config` is the configuration of the run, as far as it matters.
    """
    (directory / role).mkdir(parents=True)
    files = StateCopy.of({}).write(directory)
    source = HuggingFaceSource(model)

    def numbers(name: str) -> list[Tensor]:
        return [source.read(name).to(torch.float32).reshape(-1)]

    tensors = []
    stored = {}
    for name, form in source.tensors.items():
        box = whole(name, form.shape)
        read = functools.partial(numbers, name)
        tensors.append(TensorSource(slice_key(WEIGHT, box), torch.float32, form.shape, read))
        stored[name] = StoredTensor(form.shape, ((len(files), box.starts, box.stops),))
    files = (*files, write_tensors(directory, f"{role}/rank_00000.safetensors", tensors))

    described = StoredModel(
        head=source.spec.head,
        hf_config=source.spec.hf_config,
        dtype=str(dtype or source.dtype).removeprefix("torch."),
        layout={"tp": 1, "pp": 1, "dp": 1},
        kinds=(WEIGHT,),
        optimizer_steps=0,
        tensors=stored,
    )
    manifest = Manifest(
        step=step,
        unfinished_step=False,
        program="test",
        world_size=1,
        config=config or {},
        versions={},
        files=files,
        models={role: described},
    )
    write_bytes(directory, MANIFEST, manifest.to_bytes())
