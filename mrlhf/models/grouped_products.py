"""Matrices of one shape as one tensor, and products of groups of rows with a matrix each.

One kernel for all products keeps a GPU busy with experts that have few rows each. The file knows
rows and matrices, and no experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8  # numbers of bfloat16 that the kernel reads together
# Hopper and Blackwell. On other GPUs torch multiplies group by group, and waits for the host.
_ARCHITECTURES = (9, 10)


def has_kernel(rows: Tensor, *sizes: int) -> bool:
    """Whether `grouped_products` can multiply `rows` by matrices of these `sizes`."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(rows.device)[0] in _ARCHITECTURES
        and all(size % ALIGNMENT == 0 for size in sizes)
    )


def grouped_products(rows: Tensor, ends: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply each row by its group's transposed matrix, to [rows, out].

    `rows` [rows, in] are sorted by group, `ends` are the groups' ends, int32 [groups], and each of
    the `matrices` is [out, in].
    """
    return _GroupedProducts.apply(rows, ends, *matrices)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as [tensors, ...]: a view if they lie one after another, else a copy."""
    first = tensors[0]
    places = [tensor.data_ptr() - first.data_ptr() for tensor in tensors]
    in_a_row = all(
        tensor.is_contiguous()
        and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and place == number * first.nbytes
        for number, (tensor, place) in enumerate(zip(tensors, places, strict=True))
    )
    if not in_a_row:
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


class _GroupedProducts(torch.autograd.Function):
    """If matrices do not lie in a row, they are copied again for the backward pass.

    Without rows it gives gradients of zero in the same order as with rows: replicas of the matrices
    may exchange them as soon as they exist.
    """

    @staticmethod
    def forward(context: Any, rows: Tensor, ends: Tensor, *matrices: Tensor) -> Tensor:
        context.save_for_backward(rows, ends, *matrices)
        if not len(rows):
            return rows.new_empty(0, len(matrices[0]))
        return F.grouped_mm(rows, stacked(matrices).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *matrices = context.saved_tensors
        are_frozen = not context.needs_input_grad[2]
        if not len(rows):
            zeros = [None if are_frozen else torch.zeros_like(matrix) for matrix in matrices]
            return torch.zeros_like(rows), None, *zeros
        grad = grad.contiguous()
        grad_rows = F.grouped_mm(grad, stacked(matrices), offs=ends)
        if are_frozen:
            return grad_rows, None, *(None for _ in matrices)
        # Not every version of the kernel writes the zeros of a group without rows.
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        grad_matrices = F.grouped_mm(grad.t(), rows, offs=ends)
        grad_matrices = grad_matrices.masked_fill(is_empty[:, None, None], 0.0)
        return grad_rows, None, *grad_matrices.unbind()
