"""Matrix products with weights laid out for the machine, and the dtype that suits them.

On a host, oneDNN's packed layout is up to twice as fast as the plain one for the few dozen rows of
a decode step. In float32 a row's product there does not depend on the other rows, to the last bit;
with the plain layout it depends on how many there are. So on a host in float32 a response is the
same whatever is generated beside it. This file knows matrices, and no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]

# Measured: see docs/generation.md.
_PACKED_ROWS = range(2, 129)
_PACKED_ELEMENTS = 2**16
_TYPICAL_ROWS = 32


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which weights of `dtype` are kept and multiplied.

    A host without bfloat16 instructions multiplies bfloat16 several times slower than float32.
    There the weights are widened, which loses nothing.
    """
    is_host_bfloat16 = device.type == "cpu" and dtype == torch.bfloat16
    if is_host_bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return dtype


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The function x [rows, in] -> x @ weight.T + bias [rows, out].

    The weight [out, in] must not change afterwards. On a host it is packed now, in memory of its
    own, if it is float32 or large.
    """
    on_host = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    large = weight.numel() >= _PACKED_ELEMENTS
    if not on_host or not (large or weight.dtype == torch.float32):
        return lambda x: F.linear(x, weight, bias)

    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    pointwise = torch.ops.mkldnn._linear_pointwise

    def multiply(x: Tensor) -> Tensor:
        product: Tensor = pointwise(x, packed, bias, "none", [], "")
        return product

    def multiply_alike(x: Tensor) -> Tensor:
        rows = x.shape[0]  # `len` of a tensor takes longer
        if rows == 1:  # one row alone goes through another kernel, which rounds otherwise
            return multiply(x.expand(2, -1))[:1]
        return multiply(x) if rows else F.linear(x, weight, bias)

    def multiply_faster(x: Tensor) -> Tensor:
        return multiply(x) if len(x) in _PACKED_ROWS else F.linear(x, weight, bias)

    return multiply_alike if weight.dtype == torch.float32 else multiply_faster
