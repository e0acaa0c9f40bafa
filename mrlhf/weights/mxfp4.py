"""Numbers in MXFP4, as files of gpt-oss hold the weights of experts.

A block of 32 numbers is 16 bytes, with two numbers of 4 bits in each, the lower bits first, and has
one scale, a power of two, in a byte. Defined by the OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # numbers that share a scale
BYTES = BLOCK // 2
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponents


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers as bfloat16, [..., 32 * blocks], which holds each of them exactly.

    `blocks` are uint8 [..., blocks, 16], and `scales` uint8 [..., blocks].
    """
    table = torch.tensor([*_POSITIVE, *(-x for x in _POSITIVE)], dtype=torch.float32)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(table[pairs.int()], scales.int()[..., None] - _BIAS)
    return numbers.to(torch.bfloat16).flatten(-2)
