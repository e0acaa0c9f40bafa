"""The module of RMSNorm, with the mark that sequence parallelism needs.

It takes the arguments that megatron-core's layer specs pass. It does not know where in the model it
stands.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.models.kernels import rms_norm


class RMSNorm(torch.nn.Module):
    """Root-mean-square normalisation over the last dimension, as in Hugging Face's Llama."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank normalises its own tokens, so megatron-core must sum
        # this gradient over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] normalised, in its dtype."""
        return rms_norm(x, self.weight, self.eps)
