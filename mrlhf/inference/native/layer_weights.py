"""The weights of one layer, in the dtype in which the engine computes, by their names in the layer.

This file does not know what a layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.inference.native.adapters import adapted, factors_of
from mrlhf.inference.native.linear import Linear, linear
from mrlhf.inference.native.parameters import Parameters
from mrlhf.models.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """Those of layer `number` on this rank."""

    spec: ModelSpec
    parameters: Parameters
    dtype: torch.dtype
    number: int

    def named(self, name: str) -> str:
        """Return the name of a parameter among those of all layers."""
        return f"decoder.layers.{self.number}.{name}"

    def tensor(self, name: str) -> Tensor:
        """Return a parameter as it is."""
        return self.parameters[self.named(name)].to(self.dtype)

    def norm(self, name: str) -> Tensor:
        """Return what a norm multiplies by."""
        return norm_of(self.spec, self.parameters, self.dtype, self.named(name))

    def linear(self, name: str, bias: Tensor | None = None) -> Linear:
        """Return the function of a parameter and its adapters."""
        own = self.named(name)
        base: Linear = self.parameters.made_of(own, lambda: linear(self.tensor(name), bias))
        return adapted(self.parameters, self.dtype, own, base)

    def matrix(self, name: str) -> Tensor:
        """Return a parameter with its adapters, in one matrix."""
        own = self.named(name)
        base = self.tensor(name)
        added = factors_of(self.parameters, own, torch.float32)
        if added is None:
            return base
        whole = (base.float() + added.second @ added.first).to(self.dtype)
        return self.parameters.kept(f"{own} whole", whole)


def norm_of(spec: ModelSpec, parameters: Parameters, dtype: torch.dtype, name: str) -> Tensor:
    """Return what the norm of this name multiplies by; float32 where that is not its weight."""
    weight = parameters[name]
    if spec.norm_offset is not None:
        return parameters.kept(name, spec.norm_offset + weight.float())
    return weight.to(dtype)
