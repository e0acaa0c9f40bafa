"""Matrix products with weights laid out for the machine.

On a host in float32 a row's product does not depend on the other rows, to the last bit, so a
response is the same whatever else is generated. The products are compiled (`products.h`); without a
compiler they are oneDNN's, with packed weights. torch's plain product is slower, and depends on how
many rows there are. This file knows matrices, and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.host import kernels
from mrlhf.host.kernels import Kernels, threads_for_products
from mrlhf.host.pages import read_often
from mrlhf.host.products import mm

Linear = Callable[[Tensor], Tensor]

# Measured: docs/lab/2026-11-generation.md.
_PACKED_ROWS = range(2, 129)
_LEAST_PACKED_ELEMENTS = 2**16
_TYPICAL_ROWS = 32


class Factors(NamedTuple):
    """The factors of a matrix of low rank that is added to a weight [out, in]."""

    first: Tensor  # [ranks, in]
    second: Tensor  # [out, ranks]


class HostLinear:
    """x @ weight.T + bias in float32 on the compiled product, with a copy of the weight."""

    def __init__(self, host: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        """Lay out the weight [out, in]."""
        self._multiply = host.multiply
        self._columns = len(weight)
        laid_out = panels(weight, host.panel_columns)
        self._panels = read_often(tuple(laid_out.shape), laid_out.dtype).copy_(laid_out)
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, in]: [rows, out]."""
        assert x.dtype == torch.float32, x.dtype
        x = x.contiguous()
        rows, size = x.shape
        out = torch.empty((rows, self._columns), dtype=torch.float32)
        threads = threads_for_products(rows * size * self._columns)
        self._multiply(x, self._panels, self._bias, out, rows, size, self._columns, threads)
        return out


def with_added(base: Linear, added: Factors | None) -> Linear:
    """Return the function x [rows, in] -> base(x) + x @ added.T; `base` if nothing is added.

    What is added is computed apart, so that the sum of the matrices is not rounded.
    """
    if added is None:
        return base
    first = linear(added.first)
    second = linear(added.second)
    return lambda x: base(x).add_(second(first(x.to(added.first.dtype))))


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the function x [rows, in] -> x @ weight.T + bias [rows, out].

    The weight [out, in] must not change afterwards; a host copies it if it is float32 or large.
    """
    on_host = weight.device.type == "cpu"
    host = kernels.find_for(weight)
    if weight.dtype == torch.float32 and host is not None:
        return HostLinear(host, weight, bias)

    packs = on_host and torch.backends.mkldnn.is_available()
    large = weight.numel() >= _LEAST_PACKED_ELEMENTS
    if not packs or not (large or weight.dtype == torch.float32):
        return lambda x: F.linear(x, weight, bias)
    return _packed(weight, bias)


def linear_in_float32(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the function `linear` of a weight of any dtype whose results are float32.

    The `bias` is float32.
    """
    if weight.device.type == "cpu" or weight.dtype == torch.float32:
        widened = linear(weight.float(), bias)
        return lambda x: widened(x.float())
    transposed = weight.t()
    columns = len(weight)

    def multiply(x: Tensor) -> Tensor:
        out = mm(x, transposed, x.new_empty((len(x), columns), dtype=torch.float32))
        return out if bias is None else out.add_(bias)

    return multiply


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the same function with the weight in oneDNN's layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    pointwise = torch.ops.mkldnn._linear_pointwise

    def multiply(x: Tensor) -> Tensor:
        product: Tensor = pointwise(x, packed, bias, "none", [], "")
        return product

    def multiply_alike(x: Tensor) -> Tensor:
        rows = x.shape[0]  # `len` of a tensor takes longer
        if rows == 1:  # a single row goes through another kernel, which rounds differently
            return multiply(x.expand(2, -1))[:1]
        return multiply(x) if rows else F.linear(x, weight, bias)

    def multiply_faster(x: Tensor) -> Tensor:
        return multiply(x) if len(x) in _PACKED_ROWS else F.linear(x, weight, bias)

    return multiply_alike if weight.dtype == torch.float32 else multiply_faster


def panels(weight: Tensor, columns: int) -> Tensor:
    """Rearrange a weight [out, in] as [panels, in, columns], as `mrlhf/host/products.h` wants."""
    missing = -len(weight) % columns
    filled = F.pad(weight, (0, 0, 0, missing)) if missing else weight  # it copies in any case
    return filled.unflatten(0, (-1, columns)).transpose(1, 2)
