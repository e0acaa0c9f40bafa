"""Parts of a flat tensor on the host, such as the used numbers in the rows of a table.

This file knows no batch and no packs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Parts(NamedTuple):
    """Parts of a flat tensor, one part after the other."""

    begins: Tensor  # int64 [parts], where each part begins
    counts: Tensor  # int64 [parts], how many numbers each part has

    @property
    def places(self) -> Tensor:
        """The indices of the numbers of all parts, int64."""
        shifts = self.begins - (self.counts.cumsum(0) - self.counts)
        places = np.repeat(shifts.numpy(), self.counts.numpy())
        places += np.arange(len(places))
        return torch.from_numpy(places)

    def of(self, flat: Tensor) -> Tensor:
        """A copy of the numbers of all parts."""
        # NumPy repeats numbers and takes slices several times as fast as torch does.
        numbers = flat.numpy()
        ends = (self.begins + self.counts).tolist()
        slices = [numbers[begin:end] for begin, end in zip(self.begins.tolist(), ends, strict=True)]
        return torch.from_numpy(np.concatenate([numbers[:0], *slices]))

    def put(self, flat: Tensor, numbers: Tensor) -> None:
        """Write `numbers` [..., numbers of all parts] into the parts of `flat` [..., size]."""
        target = flat.numpy()
        source = numbers.numpy()
        done = 0
        for begin, count in zip(self.begins.tolist(), self.counts.tolist(), strict=True):
            target[..., begin : begin + count] = source[..., done : done + count]
            done += count

    @staticmethod
    def join(several: list[Parts]) -> Parts:
        """All parts of `several` (at least one), one after the other."""
        return Parts(*(torch.cat(column) for column in zip(*several, strict=True)))
