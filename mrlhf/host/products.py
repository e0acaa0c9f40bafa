"""Matrix products of bfloat16: with results in float32, and on a CPU in the faster format.

A product of bfloat16 is summed in float32. It is rounded unless a GPU, by an operator of torch 2.8,
leaves it in float32, or a CPU multiplies the numbers as float32.

Many CPUs multiply float32 faster than bfloat16, also some that have instructions for bfloat16. On
these the numbers are widened, which loses nothing, multiplied, and the sums are rounded once, as a
product of bfloat16 rounds them. This file knows matrices, and no model.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mrlhf.host.library import processor_says

_MOST_WIDENED = 1 << 22  # numbers of a matrix that are widened at once
_log = logging.getLogger(__name__)


@cache
def float32_is_faster() -> bool:
    """Whether this machine multiplies float32 faster than bfloat16."""
    # Its instructions decide and not a clock, so that ranks and starts of a run agree. Those of AMX
    # are fast; those of AVX-512 (`vdpbf16ps`) have twice float32's rate on AMD's processors, and on
    # Intel's half of it.
    if torch.cpu._is_amx_tile_supported():
        return False
    is_amd = processor_says("vendor_id") == "AuthenticAMD"
    return not (torch.cpu._is_avx512_bf16_supported() and is_amd)


@cache
def gpu_gives_float32() -> bool:
    """Whether a GPU gives products of bfloat16 in float32 with this torch; tried once."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    total = torch.ones(16, 16, dtype=torch.float32, device="cuda")
    try:
        torch.mm(ones, ones, out_dtype=total.dtype, out=total)
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError) as error:  # of an older torch
        _log.warning("logits and gradients of weights are rounded to bfloat16: %s", error)
        return False
    return bool((total == 32).all())


def is_widened(matrix: Tensor) -> bool:
    """Whether products of this matrix are computed in float32 although it is bfloat16."""
    on_host = matrix.device.type == "cpu" and matrix.dtype == torch.bfloat16
    return on_host and float32_is_faster()


def matmul(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """`torch.matmul` of a [..., inner] and a matrix b [inner, columns], without a gradient."""
    if options or not is_widened(a) or b.dim() != 2 or b.dtype != a.dtype:
        return torch.matmul(a, b, **options)
    *rows, inner = a.shape
    flat = a.reshape(math.prod(rows), inner)
    return mm(flat, b, a.new_empty(len(flat), b.shape[1])).view(*rows, b.shape[1])


def mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """`torch.mm` of a [rows, inner] and b [inner, columns] to `out`, of their dtype or float32."""
    if a.dtype == out.dtype and not is_widened(a):
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        if gpu_gives_float32():
            return torch.mm(a, b, out_dtype=out.dtype, out=out)
        return out.copy_(a @ b)
    inner, columns = b.shape
    if inner > _MOST_WIDENED // max(1, columns) and inner > columns:
        total = torch.zeros_like(out, dtype=torch.float32)
        for part in _parts(inner, max(columns, len(a))):
            total.addmm_(_wide(a[:, part]), _wide(b[part]))
        return out.copy_(total)
    for part in _parts(columns, inner):
        wide = _wide(b[:, part])
        for rows in _parts(len(a), max(inner, wide.shape[1])):
            out[rows, part] = _wide(a[rows]) @ wide
    return out


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of a [rows, inner] and b [inner, columns] to a float32 sum."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and gpu_gives_float32():
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif is_widened(a):
        wide = _wide(b)
        for rows in _parts(len(a), max(a.shape[1], b.shape[1])):
            total[rows].addmm_(_wide(a[rows]), wide)
    else:
        total.add_(a @ b)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [rows, in] @ weight.T of a weight [out, in], with gradients in both."""
    return _WidenedProduct.apply(x, weight) if is_widened(x) else x @ weight.t()


class _WidenedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        of_x = matmul(grad, weight) if needs_x else None
        return of_x, matmul(grad.t(), x) if needs_weight else None


def _wide(matrix: Tensor) -> Tensor:
    """The matrix in float32, laid out as it is."""
    if matrix.stride(0) < matrix.stride(1):
        return matrix.t().to(torch.float32, memory_format=torch.contiguous_format).t()
    return matrix.float()


def _parts(length: int, width: int) -> list[slice]:
    """Cut a dimension so that a part of a matrix of this width is not too large to widen."""
    step = max(1, _MOST_WIDENED // max(1, width))
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]
