"""Memory that a host takes directly from the system, in large pages where it has them.

This file does not know what the memory is for.
"""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_LARGE_PAGE_BYTES = 2**21


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in the system's own zero pages, which cost nothing until they are used."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def read_often(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an unfilled tensor for weights that each pass reads from one end to the other."""
    # In large pages the processor looks up few addresses; small weights are not worth a page.
    if math.prod(shape) * dtype.itemsize < _LARGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return zero_pages(shape, dtype)
