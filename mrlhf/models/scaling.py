"""Factors that some models have and megatron-core's GPTModel has not.

This file is handed modules and numbers, and knows no family.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def scale_embeddings(embedding: nn.Module, multiplier: float) -> None:
    """Multiply what the embedding layer gives."""
    if multiplier != 1.0:
        embedding.register_forward_hook(lambda module, inputs, output: output * multiplier)


def scale_logits(output_layer: nn.Module, divisor: float) -> None:
    """Divide the logits."""

    def divide(
        module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        logits, bias = output
        return logits / divisor, bias

    if divisor != 1.0:
        output_layer.register_forward_hook(divide)
