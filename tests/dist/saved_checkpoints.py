"""Compares two checkpoints of a model, whatever the layouts that saved them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.manifest import read_manifest
from mrlhf.checkpoint.slice_reader import SliceReader
from mrlhf.weights.boxes import whole


def assert_equal_checkpoints(first: Path, second: Path, role: str = "actor") -> None:
    """Both hold the same float32 weights and moments, after as many steps."""
    models = [read_manifest(path).models[role] for path in (first, second)]
    assert models[0].optimizer_steps == models[1].optimizer_steps > 0
    wanted = _tensors(first, role)
    tensors = _tensors(second, role)
    assert tensors.keys() == wanted.keys()
    assert any(name.startswith("exp_avg_sq") for name in tensors)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, wanted[name]), f"{name} of {first} in {second}"


def _tensors(directory: Path, role: str) -> dict[str, Tensor]:
    """Every stored tensor, whole, by kind and name."""
    manifest = read_manifest(directory)
    model = manifest.models[role]
    reader = SliceReader(directory, manifest)
    tensors = {}
    for name, stored in model.tensors.items():
        for kind in _kinds_of(name, model.kinds):
            tensors[f"{kind} {name}"] = reader.read(role, kind, whole(name, stored.shape))
    return tensors


def _kinds_of(name: str, kinds: tuple[str, ...]) -> list[str]:
    """What is stored of a tensor; of all optimizers, Muon has one moment of some."""
    if "momentum_buffer" not in kinds:
        return list(kinds)
    is_matrix = name.endswith("_proj.weight")
    return ["weight", *(["momentum_buffer"] if is_matrix else ["exp_avg", "exp_avg_sq"])]
