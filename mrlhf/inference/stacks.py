"""Tensors of one shape as one tensor, such as the weights of the experts of a layer.

This file knows tensors alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
