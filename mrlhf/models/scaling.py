"""Factors that some models have and megatron-core's GPTModel has not.

This file is handed modules and numbers, and knows no family.
"""

from __future__ import annotations

from torch import nn


def scale_embeddings(embedding: nn.Module, multiplier: float) -> None:
    """Multiply what the embedding layer gives."""
    if multiplier != 1.0:
        embedding.register_forward_hook(lambda module, inputs, output: output * multiplier)
