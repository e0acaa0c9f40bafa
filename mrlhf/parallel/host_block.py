"""Memory of the host for tensors of a device, pinned in one block of the size that they need.

torch rounds each pinned tensor up to a power of two, and keeps the memory when the tensor is gone.
A block is given back with the last tensor in it. This file does not know what the tensors hold.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNMENT = 512  # bytes, as of torch's tensors on a GPU


class _Pinned(mmap.mmap):
    """Memory that a GPU reads and writes while the host goes on, until nobody has it any more."""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize()  # a copy may be under way
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.address))


def host_tensors(like: Sequence[tuple[int, torch.dtype]], pinned: bool) -> list[Tensor]:
    """Flat tensors of so many elements on the host, pinned in one block or each by itself."""
    if not pinned or not like:
        return [torch.empty(count, dtype=dtype, device="cpu") for count, dtype in like]
    sizes = [count * dtype.itemsize for count, dtype in like]
    edges = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]

    memory = _Pinned(-1, max(edges[-1], _ALIGNMENT))
    block = torch.frombuffer(memory, dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))
    memory.address = block.data_ptr()
    return [
        block[begin : begin + size].view(dtype)
        for begin, size, (_, dtype) in zip(edges, sizes, like, strict=False)
    ]
