"""Cuts what one rank sends into parcels that several ranks unpack.

Pure arithmetic on moves. It does not know tensors, memory or how a parcel travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrlhf.reshard.moves import Move, split


@dataclass(frozen=True)
class PackedSlice:
    """One slice in a parcel.

    Attributes:
        offset: numbers before it in the parcel.
        moves: the moves that send this slice, one for each rank that needs it.
    """

    offset: int
    moves: tuple[Move, ...]

    @property
    def elements(self) -> int:
        """Numbers in the slice."""
        return self.moves[0].elements


@dataclass(frozen=True)
class Parcel:
    """What one rank packs at a time.

    Attributes:
        slices: the slices, one after the other without gaps.
        readers: the ranks that unpack at least one of them, ascending.
    """

    slices: tuple[PackedSlice, ...]
    readers: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers in the parcel."""
        return self.slices[-1].offset + self.slices[-1].elements


def parcels_of(moves: Sequence[Move], capacity: int) -> list[Parcel]:
    """Cut the moves of one sending rank into parcels, tensor by tensor.

    A slice that several ranks need is packed once. Going tensor by tensor keeps all receivers busy
    at the same time.

    Args:
        moves: all moves from one rank.
        capacity: the most numbers of a parcel, unless one row of a tensor is larger.
    """
    tensor_order: dict[str, int] = {}
    moves_of_slice: dict[tuple[str, int, int, int], list[Move]] = {}
    for move in moves:
        tensor_order.setdefault(move.source.name, len(tensor_order))
        for part in split(move, capacity):
            key = (part.source.name, part.source.dim, part.start, part.stop)
            moves_of_slice.setdefault(key, []).append(part)

    parcels: list[list[PackedSlice]] = []
    filled = capacity
    for key in sorted(moves_of_slice, key=lambda key: (tensor_order[key[0]], *key[1:])):
        same_slice = moves_of_slice[key]
        elements = same_slice[0].elements
        if not parcels or filled + elements > capacity:
            parcels.append([])
            filled = 0
        parcels[-1].append(PackedSlice(filled, tuple(same_slice)))
        filled += elements

    return [Parcel(tuple(slices), _readers(slices)) for slices in parcels]


def _readers(slices: Sequence[PackedSlice]) -> tuple[int, ...]:
    return tuple(sorted({move.target_rank for packed in slices for move in packed.moves}))
