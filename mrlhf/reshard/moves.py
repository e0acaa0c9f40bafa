"""Moves of an interval of a named tensor, from a piece on one rank to a piece on another.

Pure arithmetic on pieces. This file does not know who holds what, nor how anything travels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from mrlhf.weights.shard import Piece


class Move(NamedTuple):
    """The interval [start, stop) of a named tensor, from a source piece to a target piece.

    The two pieces may be on different ranks or on the same one. On both sides the interval lies in
    one block or is made of whole blocks, as `Slot.view` requires.
    """

    source_rank: int
    target_rank: int
    source: Piece
    target: Piece
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Numbers in the interval."""
        return (self.stop - self.start) * numbers_in_row(self.source)

    def __str__(self) -> str:
        return (
            f"{self.source.name}[{self.start}:{self.stop}] of dimension {self.source.dim} "
            f"from rank {self.source_rank} to rank {self.target_rank}"
        )


def numbers_in_row(piece: Piece) -> int:
    """Numbers in one step along the piece's dimension."""
    return math.prod(piece.full_shape) // piece.full_shape[piece.dim]


def viewable_parts(move: Move) -> Iterator[Move]:
    """The move itself, or parts of it, such that both sides can view each of them."""
    if _is_viewable(move.source, move) and _is_viewable(move.target, move):
        yield move
        return
    for start, stop in pairwise(_edges(move)):
        yield move._replace(start=start, stop=stop)


def split(move: Move, elements: int) -> list[Move]:
    """Cut a move into parts of at most `elements` numbers, or of one row if a row is larger."""
    rows = max(1, elements // numbers_in_row(move.source))
    if move.stop - move.start <= rows:
        return [move]

    edges: list[int] = []
    for start, stop in pairwise(_edges(move)):
        edges += range(start, stop, rows)
    edges.append(move.stop)
    return [move._replace(start=start, stop=stop) for start, stop in pairwise(edges)]


def _is_viewable(piece: Piece, move: Move) -> bool:
    """Whether the interval lies in one block of the piece or is made of whole blocks."""
    first = move.start - piece.start
    last = move.stop - piece.start
    is_in_one_block = first // piece.block == (last - 1) // piece.block
    is_whole_blocks = first % piece.block == 0 and last % piece.block == 0
    return is_in_one_block or is_whole_blocks


def _edges(move: Move) -> list[int]:
    """The start of the move, the beginnings of the blocks of either piece in it, and its stop."""
    block_starts = {
        *range(move.source.start, move.stop, move.source.block),
        *range(move.target.start, move.stop, move.target.block),
    }
    return [move.start, *sorted(edge for edge in block_starts if edge > move.start), move.stop]
