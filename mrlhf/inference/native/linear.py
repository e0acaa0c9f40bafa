"""Matrix products with weights laid out for the machine, and the dtype that suits them.

On a host in float32 a row's product does not depend on the other rows, to the last bit. So a
response is the same whatever is generated beside it. The products are compiled (`linear.cpp`);
without a compiler they are oneDNN's, with packed weights. torch's plain product is slower, and
depends on how many rows there are. This file knows matrices, and no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.compiled.library import functions_of, load_library, threads_for
from mrlhf.inference.native.host_memory import read_often
from mrlhf.inference.native.panels import panels

Linear = Callable[[Tensor], Tensor]

SOURCE = Path(__file__).with_name("linear.cpp")
_SIGNATURE = "pppp iii n"
_MULTIPLICATIONS = 4  # so many cost as much as one number of an elementwise function

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


class Product(ctypes.Structure):
    """A `HostLinear` as compiled code calls it; the same as in `mrlhf/compiled/products.h`."""

    _fields_ = (
        ("multiply", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    )


class HostLinear:
    """x @ weight.T + bias in float32 on a compiled kernel, with a copy of the weight."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        """Lay the weight [out, in] out; `library` is `linear.cpp`."""
        self._multiply: Any = functions_of(library, {"multiply": _SIGNATURE}, weight.dtype)[
            "multiply"
        ]
        self._columns, self._size = weight.shape
        laid_out = panels(weight, library.columns_of_a_panel())
        self._panels = read_often(tuple(laid_out.shape), laid_out.dtype).copy_(laid_out)
        self._bias = None if bias is None else bias.contiguous()

    @property
    def product(self) -> Product:
        """The same for compiled code, as long as this object lives."""
        return Product(
            ctypes.cast(self._multiply, ctypes.c_void_p),
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._size,
            self._columns,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The product of x [rows, in]: [rows, out]."""
        assert x.dtype == torch.float32, x.dtype
        x = x.contiguous()
        rows, size = x.shape
        out = torch.empty((rows, self._columns), dtype=torch.float32)
        bias = None if self._bias is None else self._bias.data_ptr()

        self._multiply(
            x.data_ptr(), self._panels.data_ptr(), bias, out.data_ptr(), rows, size, self._columns,
            threads_for(rows * size * self._columns // _MULTIPLICATIONS),
        )  # fmt: skip
        return out


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The function x [rows, in] -> x @ weight.T + bias [rows, out].

    The weight [out, in] must not change afterwards. On a host it is laid out now, in memory of its
    own, if it is float32 or large.
    """
    on_host = weight.device.type == "cpu"
    if on_host and weight.dtype == torch.float32 and (library := _library()) is not None:
        return HostLinear(library, weight, bias)

    packs = on_host and torch.backends.mkldnn.is_available()
    large = weight.numel() >= _PACKED_ELEMENTS
    if not packs or not (large or weight.dtype == torch.float32):
        return lambda x: F.linear(x, weight, bias)
    return _packed(weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    """The same in oneDNN's layout."""
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


@cache
def _library() -> ctypes.CDLL | None:
    return load_library(SOURCE, "the engine's matrix products")
