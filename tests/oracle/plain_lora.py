"""Low-rank adapters of transformers' models as the formula says: each weight is W + scale * B A.

The sum is a parametrisation of torch's, so the gradients of A and B come from autograd alone. An
adapter stands in a directory as peft writes it. This file shares no code with mrlhf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import parametrize

from tests.models.mixtures import as_in_files

RANK = 3
ALPHA = 4.0
PREFIX = "base_model.model."
_LINEAR = re.compile(
    r"\.layers\..*(_proj(_with_mqa|_qkvz?|_z|_ba?|_a)?|\.w[123]|\.mlp\.gate|\.mlp\.router)\.weight$"
)


def adapter_of(model: Path) -> Path:
    """Where the adapter of a model stands."""
    return model.with_name(f"{model.name}-adapter")


def save_adapter(
    model: Any,
    directory: Path,
    generator: torch.Generator,
    targets: Sequence[str] | None = None,
) -> None:
    """Write a random adapter for every linear layer of the decoder, routers too.

    It changes what is computed. With `targets`, only for layers whose names end so.
    """
    tensors: dict[str, Tensor] = {}
    weights = dict(model.named_parameters())
    for name, weight in as_in_files(weights, model.config.model_type).items():
        is_wanted = targets is None or name.split(".")[-2] in targets
        if _LINEAR.search(name) and is_wanted:
            rows, columns = weight.shape
            layer = PREFIX + name.removesuffix(".weight")
            factors = {"A": (RANK, columns), "B": (rows, RANK)}
            for factor, shape in factors.items():
                noise = 0.1 * torch.randn(shape, generator=generator)
                tensors[f"{layer}.lora_{factor}.weight"] = noise

    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted(layers),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


class Added(torch.nn.Module):
    """What the adapters of the matrices in one parameter add to it.

    Attributes:
        factors: for each matrix, one below the other and stack by stack, its name with A and B.
    """

    def __init__(self, names: list[str], stored: dict[str, Tensor], stacks: int | None) -> None:
        super().__init__()
        self.names = names
        self._stacks = stacks
        self.first = torch.nn.ParameterList([stored[f"{name}.lora_A.weight"] for name in names])
        self.second = torch.nn.ParameterList([stored[f"{name}.lora_B.weight"] for name in names])

    def forward(self, weight: Tensor) -> Tensor:
        pairs = zip(self.first, self.second, strict=True)
        products = torch.cat([b @ a for a, b in pairs])
        if self._stacks is not None:
            products = products.unflatten(0, (self._stacks, -1))
        return weight + ALPHA / RANK * products


def adapt(model: Any, directory: Path) -> None:
    """Freeze the model but a scalar head, and add the adapter of a directory to it."""
    stored = load_file(directory / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "score.weight")
    for name, parameter in list(model.named_parameters()):
        held = as_in_files({name: parameter}, model.config.model_type)
        layers = [PREFIX + matrix.removesuffix(".weight") for matrix in held]
        if f"{layers[0]}.lora_A.weight" in stored:
            owner, _, own = name.rpartition(".")
            stacks = len(parameter) if parameter.dim() == 3 else None
            added = Added(layers, stored, stacks)
            parametrize.register_parametrization(model.get_submodule(owner), own, added)


def factors_of(model: Any) -> dict[str, Tensor]:
    """A copy of the adapter, and of a scalar head, by their names in peft's files."""
    factors: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Added):
            for name, a, b in zip(module.names, module.first, module.second, strict=True):
                factors[f"{name}.lora_A.weight"] = a.detach().clone()
                factors[f"{name}.lora_B.weight"] = b.detach().clone()
    if hasattr(model, "score"):
        factors[f"{PREFIX}score.weight"] = model.score.weight.detach().clone()
    return factors
