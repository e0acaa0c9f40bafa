"""Which keys each query of attention sees.

Attention is causal within sequences. Queries are laid end to end, sequence by sequence, and the
last query of each stands beside the last of its keys. The window, which differs between layers, is
said apart. This file knows no layer and no backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mrlhf.parallel.key_exchange import KeyExchange


@dataclass(frozen=True)
class Packed:
    """Keys are laid end to end like the queries."""

    query_edges: Tensor  # where the queries of each sequence begin, and the end; int32
    key_edges: Tensor  # the same for the keys, int32 [sequences + 1]
    most_queries: int  # of one sequence
    most_keys: int
    exchange: KeyExchange | None = None  # brings keys of other ranks; None where all are here

    @cached_property
    def query_lengths(self) -> list[int]:
        """Queries of each sequence; on a GPU the first call waits for the device."""
        return self.query_edges.diff().tolist()

    @cached_property
    def key_lengths(self) -> list[int]:
        """Keys of each sequence; see `query_lengths`."""
        return self.key_edges.diff().tolist()


@dataclass(frozen=True)
class Paged:
    """Keys lie in the blocks of a cache."""

    query_edges: Tensor  # where the queries of each sequence begin, and the end; int32
    lengths: Tensor  # keys of each sequence, int32 [sequences]
    block_tables: Tensor  # the blocks of each sequence in order, int32 [sequences, blocks]
    most_queries: int  # of one sequence
    most_keys: int  # or more

    def parts(self) -> Iterator[AlikeSequences]:
        """All sequences, in parts that are computed together.

        They are those with one query, without waiting for the device if there are no others. A
        chunk of a prompt stands alone: padding the others to its length would take more memory than
        the model.
        """
        device = self.lengths.device
        if self.most_queries == 1:
            rows = torch.arange(len(self.lengths), device=device)[:, None]
            yield AlikeSequences(rows, slice(None), self.most_keys)
            return

        starts = self.query_edges.tolist()
        lengths = self.lengths.tolist()
        counts = self.query_edges.diff().tolist()
        single = [number for number, count in enumerate(counts) if count == 1]
        chunks = [[number] for number, count in enumerate(counts) if count != 1]
        for part in [single, *chunks] if single else chunks:
            rows = torch.tensor([range(starts[s], starts[s + 1]) for s in part], device=device)
            yield AlikeSequences(rows, part, max(lengths[s] for s in part))


class AlikeSequences(NamedTuple):
    """Sequences with the same number of queries in a pass."""

    rows: Tensor  # the queries of each, int64 [sequences, queries]
    sequences: slice | list[int]  # their numbers
    longest: int  # keys of none are more


Mask = Packed | Paged
