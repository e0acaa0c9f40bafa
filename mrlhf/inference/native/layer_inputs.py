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


def layer_inputs(
    spec: ModelSpec, parameters: Parameters, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Sequence[Tensor]]:
    """Return the function of embeddings [tokens, hidden], and of the tokens' rows of the table,
    which gives [tokens, size] for each layer.
    """
    name = "layer_inputs.projection.weight"
    projection: Linear = parameters.made_of(name, lambda: linear(parameters[name].to(dtype)))
    norm = norm_of(spec, parameters, dtype, "layer_inputs.norm.weight")
    size = spec.layer_input_size
    scale = spec.layer_input_scale(dtype)

    def compute(embeddings: Tensor, rows: Tensor) -> Sequence[Tensor]:
        projected = projection(embeddings) * spec.hidden_size**-0.5
        normed = add_norm(projected.view(-1, size), None, norm, spec.norm_eps).view_as(rows)
        return ((normed + rows * scale) * 2**-0.5).split(size, dim=-1)

    return compute


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
