"""What megatron-core needs to build gated delta nets without TransformerEngine and a GPU.

Its own specs choose these modules in place of TransformerEngine's, which have the same names in
checkpoints: norms multiply by 1 + their weight, and some are part of the linear layer after them.
Of flash-linear-attention it needs one function if it is deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, 1 + weight, eps)


class Norm(torch.nn.Module):
    """RMSNorm whose weight is centred on zero."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        assert config.layernorm_zero_centered_gamma
        self._eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Return x of length 1 in the mean, times 1 + the weight."""
        return _normed(x, self.weight, self._eps)


class NormedColumn(ColumnParallelLinear):
    """Such a norm, and a linear layer whose rows are split."""

    def __init__(self, input_size: int, *arguments: Any, **options: Any) -> None:
        super().__init__(input_size, *arguments, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size))

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        """Normalise, and multiply."""
        x = _normed(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(x, *arguments, **options)


class Provider(LocalSpecProvider):
    """megatron-core's own modules, but for those above."""

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether a norm is part of the linear layer after it."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """The linear layer with a norm."""
        return NormedColumn

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The norm alone."""
        return Norm


def block_spec(config: Any) -> Any:
    """megatron-core's specs of the layers of a model with delta nets."""
    for module in (variants, gpt_layer_specs):
        module.__dict__["TESpecProvider"] = Provider
    gated_delta_net.__dict__["HAVE_FLA"] = True
    gated_delta_net.__dict__["l2norm"] = lambda x: x / (x.square().sum(-1, True) + 1e-6).sqrt()
    return variants.get_transformer_block_with_experimental_attention_variant_spec(config)
