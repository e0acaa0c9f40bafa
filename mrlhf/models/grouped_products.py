"""Products of groups of rows with a matrix each, all in one kernel.

A GPU is so kept busy by experts that have few rows each. This file knows rows and matrices, and no
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 8  # numbers of bfloat16 that the kernel reads together


def has_kernel(rows: Tensor, *sizes: int) -> bool:
    """Whether `grouped_products` can be used.

    Args:
        rows: that are multiplied.
        sizes: of the matrices.
    """
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and len(rows) > 0
        and hasattr(F, "grouped_mm")
        and all(size % _ALIGNMENT == 0 for size in sizes)
    )


def grouped_products(rows: Tensor, ends: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Each row times its group's transposed matrix, [rows, out].

    Args:
        rows: [rows, in], one group after the other.
        ends: int32 [groups], where each group ends.
        matrices: of each group, [out, in].
    """
    return _GroupedProducts.apply(rows, ends, *matrices)


class _GroupedProducts(torch.autograd.Function):
    """The matrices are put together anew for the backward pass, so that no copy is kept."""

    @staticmethod
    def forward(context: Any, rows: Tensor, ends: Tensor, *matrices: Tensor) -> Tensor:
        context.save_for_backward(rows, ends, *matrices)
        return F.grouped_mm(rows, torch.stack(matrices).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *matrices = context.saved_tensors
        grad = grad.contiguous()
        grad_rows = F.grouped_mm(grad, torch.stack(matrices), offs=ends)
        grad_matrices = F.grouped_mm(grad.t(), rows, offs=ends)
        return grad_rows, None, *grad_matrices.unbind()
