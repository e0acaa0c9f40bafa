"""The tokens of a sequence that a context-parallel rank holds, in plain integers.

A sequence is padded and cut into twice as many equal segments as there are ranks. Rank r holds
segment r from the front and segment r from the end. Attention is causal, so later tokens see more
tokens than earlier ones; with one segment from each end all ranks have the same work. This file
knows neither packs nor process groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Lengths = TypeVar("Lengths", int, Tensor)


@dataclass(frozen=True)
class Segments:
    """The segments of each sequence that one context-parallel rank holds; `size` ranks share it."""

    rank: int = 0
    size: int = 1

    @property
    def count(self) -> int:
        """The number of segments of a sequence; its padded length is a multiple of this."""
        return 1 if self.size == 1 else 2 * self.size

    @property
    def held(self) -> tuple[int, ...]:
        """The numbers of the segments that this rank holds, in order."""
        return (0,) if self.size == 1 else (self.rank, self.count - 1 - self.rank)

    @property
    def of_all_ranks(self) -> list[Segments]:
        """The segments of every rank that shares the sequences, in order of ranks."""
        return [Segments(rank, self.size) for rank in range(self.size)]

    def padded(self, lengths: Lengths) -> Lengths:
        """The padded lengths of sequences of these lengths."""
        return -(-lengths // self.count) * self.count

    def pack_multiple(self, multiple: int) -> int:
        """The divisor of a pack's tokens that makes each rank's tokens divisible by `multiple`."""
        return math.lcm(self.count, self.size * multiple)


WHOLE = Segments()
"""Whole sequences, without context parallelism."""
