"""What layers add of inputs of their own, beside the hidden states; see `models.linked_layers`.

Every rank has these weights whole, but for the table, whose rows are split like the embedding's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrlhf.inference.native.layer_weights import LayerWeights, norm_of
from mrlhf.inference.native.linear import Linear, linear
from mrlhf.inference.native.operators import add_norm
from mrlhf.inference.native.parameters import Parameters
from mrlhf.models.ops import gated
from mrlhf.models.spec import ModelSpec

LayerInput = Callable[[Tensor, Tensor], Tensor]
"""The function of hidden states [tokens, hidden] and a layer's input of them [tokens, size]."""


class LayerInputs:
    """The input of each layer; `table` has this rank's rows."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, dtype: torch.dtype) -> None:
        self._spec = spec
        self._scale = spec.layer_input_scale(dtype)
        self.table = parameters["layer_inputs.table.weight"].to(dtype)
        name = "layer_inputs.projection.weight"
        self._projection: Linear = parameters.made_of(
            name, lambda: linear(parameters[name].to(dtype))
        )
        self._norm = norm_of(spec, parameters, dtype, "layer_inputs.norm.weight")

    def __call__(self, embeddings: Tensor, rows: Tensor) -> Sequence[Tensor]:
        """Return [tokens, size] for each layer, of embeddings [tokens, hidden] and the tokens' rows
        of the table.
        """
        size = self._spec.layer_input_size
        projected = self._projection(embeddings) * self._spec.hidden_size**-0.5
        normed = add_norm(projected.view(-1, size), None, self._norm, self._spec.norm_eps)
        inputs = (normed.view_as(rows) + rows * self._scale) * 2**-0.5
        return inputs.split(size, dim=-1)


def layer_input(weights: LayerWeights) -> LayerInput:
    """Return what a layer adds of its input."""
    spec = weights.spec
    gate = weights.linear("layer_input.gate.weight")
    projection = weights.linear("layer_input.projection.weight")
    norm = weights.norm("layer_input.norm.weight")

    def added(hidden: Tensor, own: Tensor) -> Tensor:
        both = torch.cat([gate(hidden), own], dim=-1)
        return add_norm(projection(gated(both, spec.activation)), None, norm, spec.norm_eps)

    return added
