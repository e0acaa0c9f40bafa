"""Matrix products with weights laid out for the machine, and the dtype they are best computed in.

On a host, oneDNN's packed layout is up to twice as fast as the plain one for the few dozen rows of
a decode step, and no better for one row or for the hundreds of a prefill. It knows matrices, and no
model.
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

    A host without bfloat16 instructions multiplies bfloat16 several times slower than float32, so
    there the weights are widened, which loses nothing.
    """
    if (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and not torch.cpu._is_avx512_bf16_supported()
    ):
        return torch.float32
    return dtype


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x [rows, in] -> x @ weight.T + bias [rows, out], for a weight [out, in] that will not change.

    The weight is packed now, in memory of its own, where that is faster.
    """
    if (
        weight.device.type != "cpu"
        or weight.numel() < _PACKED_ELEMENTS
        or not torch.backends.mkldnn.is_available()
    ):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    pointwise = torch.ops.mkldnn._linear_pointwise

    def multiply(x: Tensor) -> Tensor:
        if len(x) in _PACKED_ROWS:
            product: Tensor = pointwise(x, packed, bias, "none", [], "")
            return product
        return F.linear(x, weight, bias)

    return multiply
