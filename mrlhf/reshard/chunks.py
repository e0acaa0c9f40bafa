"""Cuts what one rank sends into chunks that several ranks unpack: pure arithmetic on moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrlhf.reshard.plan import Move, split


@dataclass(frozen=True)
class Parcel:
    """One slice in a chunk.

    Attributes:
        offset: numbers before it in the chunk.
        moves: the same slice of the same source, to one rank each.
    """

    offset: int
    moves: tuple[Move, ...]

    @property
    def elements(self) -> int:
        """Numbers in the slice."""
        return self.moves[0].elements


@dataclass(frozen=True)
class Chunk:
    """What one rank packs at a time.

    Attributes:
        parcels: the slices, one after the other without gaps.
        readers: the ranks that unpack one of them or more, ascending.
    """

    parcels: tuple[Parcel, ...]
    readers: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in the chunk."""
        return self.parcels[-1].offset + self.parcels[-1].elements


def chunks_of(moves: Sequence[Move], capacity: int) -> list[Chunk]:
    """What one rank sends, tensor by tensor, in chunks of at most `capacity` numbers where rows
    allow it.

    A slice that several ranks need is there once. Going by tensors keeps all receivers busy at the
    same time.
    """
    same: dict[tuple[str, int, int, int], list[Move]] = {}
    order: dict[str, int] = {}
    for part in (part for move in moves for part in split(move, capacity)):
        order.setdefault(part.source.name, len(order))
        same.setdefault((part.source.name, part.source.dim, part.start, part.stop), []).append(part)
    chunks: list[list[Parcel]] = []
    filled = capacity
    for key in sorted(same, key=lambda key: (order[key[0]], *key[1:])):
        elements = same[key][0].elements
        if not chunks or filled + elements > capacity:
            chunks.append([])
            filled = 0
        chunks[-1].append(Parcel(filled, tuple(same[key])))
        filled += elements
    return [Chunk(tuple(parcels), _readers(parcels)) for parcels in chunks]


def _readers(parcels: Sequence[Parcel]) -> tuple[int, ...]:
    return tuple(sorted({move.target_rank for parcel in parcels for move in parcel.moves}))
