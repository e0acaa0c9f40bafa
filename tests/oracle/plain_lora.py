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

from tests.models.mixtures import IN_STACKS, as_in_files

RANK = 3
ALPHA = 4.0
PREFIX = "base_model.model."
_LINEAR = re.compile(
    r"\.layers\..*((_proj(_with_mqa|_qkvz?|_z|_ba?|_a)?|\.w[123]|\.mlp\.gate|\.router(\.proj)?"
    r"|\.per_layer_(input_gate|projection))\.weight"
    r"|\.experts\.\d+\.(gate_up|down)_proj)$"
)
_OF_STACK = re.compile(r"(.*\.experts)\.\d+\.(gate_up_proj|down_proj)\.(lora_[AB]\.weight)")


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
        is_wanted = targets is None or name.removesuffix(".weight").split(".")[-1] in targets
        if _LINEAR.search(name) and is_wanted:
            rows, columns = weight.shape
            layer = PREFIX + name.removesuffix(".weight")
            factors = {"A": (RANK, columns), "B": (rows, RANK)}
            for factor, shape in factors.items():
                noise = 0.1 * torch.randn(shape, generator=generator)
                tensors[f"{layer}.lora_{factor}.weight"] = noise

    directory.mkdir()
    stored = as_stored(tensors, model)
    save_file(stored, directory / "adapter_model.safetensors", {"format": "pt"})
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    parameters: dict[str, str] = {}
    if model.config.model_type in IN_STACKS:  # whose experts are no modules of torch
        parameters = {own: f"experts.{own}" for own in ("gate_up_proj", "down_proj")}
    if model.config.model_type == "gpt_oss":  # nor are its routers
        parameters["router"] = "router.weight"
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted(layers - parameters.keys()),
        "target_parameters": [parameters[layer] for layer in sorted(layers & parameters.keys())],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def _joined_name(name: str, model: Any) -> str | None:
    """The name under which peft joins a factor of an expert in a stack with those of the others.

    Of the two stacks of a module it wraps the one around the other.
    """
    found = _OF_STACK.fullmatch(name)
    if found is None or model.config.model_type not in IN_STACKS:
        return None
    module, own, factor = found.groups()
    return f"{module}.{'base_layer.' if own == 'gate_up_proj' else ''}{factor}"


def as_stored(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The tensors of peft's file with these factors; of experts in stacks it joins them."""
    stored: dict[str, Tensor] = {}
    joined: dict[str, list[Tensor]] = {}
    for name, factor in tensors.items():
        of_all = _joined_name(name, model)
        if of_all is None:
            stored[name] = factor
        else:
            joined.setdefault(of_all, []).append(factor)
    for name, factors in joined.items():
        if "lora_A" in name:
            stored[name] = torch.cat(factors)
        else:  # the first column of each expert, then the second ones
            stored[name] = torch.stack(factors, dim=2).flatten(1)
    return stored


def separated(stored: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The factors of peft's file, or their gradients, those of each expert by themselves."""
    factors: dict[str, Tensor] = {}
    for name in as_in_files(dict(model.named_parameters()), model.config.model_type):
        for factor in ("lora_A.weight", "lora_B.weight"):
            own = f"{PREFIX}{name.removesuffix('.weight')}.{factor}"
            of_all = _joined_name(own, model)
            if own in stored:
                factors[own] = stored[own]
            elif of_all in stored:
                joined = stored[of_all]
                count = next(len(stack) for stack in model.parameters() if stack.dim() == 3)
                number = int(own.split(".experts.")[1].split(".")[0])
                if "lora_A" in factor:
                    factors[own] = joined.chunk(count)[number].clone()
                else:
                    factors[own] = joined[:, number::count].clone()
    return factors


class Added(torch.nn.Module):
    """What the adapters of the matrices in one parameter add to it.

    Attributes:
        factors: for each matrix, one below the other and stack by stack, its name with A and B.
    """

    def __init__(
        self,
        names: list[str],
        stored: dict[str, Tensor],
        stacks: int | None,
        is_transposed: bool,
    ) -> None:
        super().__init__()
        self.names = names
        self._stacks = stacks
        self._is_transposed = is_transposed
        self.first = torch.nn.ParameterList([stored[f"{name}.lora_A.weight"] for name in names])
        self.second = torch.nn.ParameterList([stored[f"{name}.lora_B.weight"] for name in names])

    def forward(self, weight: Tensor) -> Tensor:
        pairs = zip(self.first, self.second, strict=True)
        products = torch.cat([b @ a for a, b in pairs])
        if self._stacks is not None:
            products = products.unflatten(0, (self._stacks, -1))
        if self._is_transposed:
            products = products.transpose(1, 2)
        return weight + ALPHA / RANK * products


def adapt(model: Any, directory: Path) -> None:
    """Freeze the model but a scalar head, and add the adapter of a directory to it."""
    stored = separated(load_file(directory / "adapter_model.safetensors"), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "score.weight")
    for name, parameter in list(model.named_parameters()):
        held = as_in_files({name: parameter}, model.config.model_type)
        layers = [PREFIX + matrix.removesuffix(".weight") for matrix in held]
        if f"{layers[0]}.lora_A.weight" in stored:
            owner, _, own = name.rpartition(".")
            stacks = len(parameter) if parameter.dim() == 3 else None
            is_transposed = stacks is not None and model.config.model_type == "gpt_oss"
            added = Added(layers, stored, stacks, is_transposed)
            parametrize.register_parametrization(model.get_submodule(owner), own, added)


def factors_of(model: Any) -> dict[str, Tensor]:
    """A copy of the adapter, and of a scalar head, with a name for each expert's factors."""
    factors: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, Added):
            for name, a, b in zip(module.names, module.first, module.second, strict=True):
                factors[f"{name}.lora_A.weight"] = a.detach().clone()
                factors[f"{name}.lora_B.weight"] = b.detach().clone()
    if hasattr(model, "score"):
        factors[f"{PREFIX}score.weight"] = model.score.weight.detach().clone()
    return factors
