"""The linear layers of a model, split over tensor-parallel ranks, to which adapters may be added.

This file knows no family.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from mrlhf.host.products import linear
from mrlhf.models.adapters import Adapters


def whole_parameter(config: TransformerConfig, *shape: int, value: float = 0.0) -> Parameter:
    """Return a parameter that every tensor-parallel rank has whole, full of one number.

    Under sequence parallelism each rank sees its own tokens, and megatron-core sums the gradients
    of parameters with this mark over the tensor-parallel group.
    """
    parameter = Parameter(torch.full(shape, value, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def split_parameter(config: TransformerConfig, *shape: int, value: float = 0.0) -> Parameter:
    """Return this rank's part of a parameter that ranks split along its first dimension.

    The ranks' parts are different numbers, and all of them count in the gradient's norm.
    """
    parameter = Parameter(torch.full(shape, value, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def adapted(output: Tensor, adapters: Adapters | None, x: Tensor) -> Tensor:
    """Return `output`, the product of a layer with x, with what its adapters add."""
    if adapters is None or not adapters.is_on:
        return output
    added: Tensor = adapters(x)
    return output + added


class ColumnLinear(ColumnParallelLinear):
    """A linear layer with rows split over ranks; megatron-core counts them as columns."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.adapters: Adapters | None = None

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Map x [..., input_size] to [..., output_size of the rank], and a bias not yet added."""
        output, bias = super().forward(x, **options)
        return adapted(output, self.adapters, x), bias


class KeysAsValuesLinear(ColumnLinear):
    """The linear layer of queries and keys, in the place of one that has as many values too."""

    missing = 1  # of keys and values

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        output_size -= self.missing * config.num_query_groups * config.kv_channels
        super().__init__(input_size, output_size, config=config, **options)


class QueriesLinear(KeysAsValuesLinear):
    """The linear layer of queries alone, in the place of one that has keys and values too."""

    missing = 2


class RowLinear(RowParallelLinear):
    """A linear layer with columns split over ranks; megatron-core counts them as rows."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.adapters: Adapters | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map x [..., input_size of the rank] to [..., output_size], and a bias not yet added."""
        output, bias = super().forward(x)
        return adapted(output, self.adapters, x), bias


class WholeLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole, without a bias."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = whole_parameter(config, output_size, input_size)
        self.adapters: Adapters | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., input_size] to [..., output_size]."""
        product = linear(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return adapted(product, self.adapters, x)


class BiasedColumnLinear(ColumnLinear):
    """A linear layer with rows split over ranks, and a bias, whatever the configuration says."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "bias": True})


class BiasedRowLinear(RowLinear):
    """A linear layer with columns split over ranks, and a bias that every rank has whole.

    It adds the bias itself. An MLP that gave it to its layer could not be recomputed: the weight
    would become a result of the recomputation, which would then compute itself again without end.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "bias": True})

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map x [..., input_size of the rank] to [..., output_size], and no bias."""
        output, bias = super().forward(x)
        assert bias is not None
        return output + bias, None
