"""Factors that some models have and megatron-core's GPTModel has not.

This file is handed modules and numbers, and knows no family.
"""

from __future__ import annotations

import math

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


def scale_embeddings(embedding: nn.Module, multiplier: float) -> None:
    """Multiply what the embedding layer gives."""
    if multiplier != 1.0:
        embedding.register_forward_hook(lambda module, inputs, output: output * multiplier)


def scale_rotation(config: TransformerConfig, scale: float) -> None:
    """Multiply the cosines and sines of every layer that rotates.

    megatron-core's attention multiplies them by (0.1 a ln(s) + 1) / (0.1 b ln(s) + 1). It looks for
    s, a and b among the attributes of the configuration, which does not declare them.
    """
    if scale != 1.0:
        config.yarn_rotary_scaling_factor = math.exp(10.0)
        config.yarn_mscale = scale - 1.0
        config.yarn_mscale_all_dim = 0.0
