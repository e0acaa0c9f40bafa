"""Plans which slices travel from which rank to which, to bring weights into another layout.

A plan has three parts:

- aliases: the target parameter has exactly the pieces of a source parameter on the same rank, so
  nothing is copied;
- copies: the rank already holds the slice, in another arrangement;
- moves: all other slices. Each byte that a rank needs and does not hold crosses one link, once.

Planning is pure and deterministic, so every rank derives the same plan alone. The time it takes
grows with the number of ranks. If each replica of the target lies inside one model-parallel group
of the source, it is enough to plan for one such group. This file knows pieces and ranks; it does
not know models, tensors or process groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mrlhf.errors import WeightError
from mrlhf.weights.shard import Key, Piece

Cost = tuple[bool, bool, int, int]


@dataclass(frozen=True)
class Move:
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
        return (self.stop - self.start) * _row(self.source)

    def __str__(self) -> str:
        return (
            f"{self.source.name}[{self.start}:{self.stop}] of dimension {self.source.dim} "
            f"from rank {self.source_rank} to rank {self.target_rank}"
        )


@dataclass(frozen=True)
class Alias:
    """A target parameter that shares the storage of a source parameter with the same pieces."""

    rank: int
    parameter: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """All moves, copies and aliases of all ranks; every rank has them in the same order.

    Attributes:
        moves: slices that travel from one rank to another.
        copies: slices that are copied within their rank.
        aliases: parameters that share storage.
        itemsize: bytes of a number.
        minimum: bytes that each target rank needs and does not hold, counted from the layouts and
            not from `moves`.
    """

    moves: tuple[Move, ...]
    copies: tuple[Move, ...]
    aliases: tuple[Alias, ...]
    itemsize: int
    minimum: dict[int, int]

    @property
    def bytes_moved(self) -> int:
        """Bytes that travel from one rank to another."""
        return self.itemsize * sum(move.elements for move in self.moves)

    @property
    def bytes_minimum(self) -> int:
        """Bytes that any plan has to move."""
        return sum(self.minimum.values())

    @property
    def bytes_local(self) -> int:
        """Bytes copied within their rank."""
        return self.itemsize * sum(copy.elements for copy in self.copies)


def plan(
    source: Mapping[int, Sequence[Piece]],
    target: Mapping[int, Sequence[Piece]],
    itemsize: int,
    locality: Sequence[Sequence[int]] = (),
) -> ReshardPlan:
    """Plan how the ranks get from the pieces of one layout to the pieces of another.

    A rank takes what it holds itself. Otherwise it takes a slice from a rank of its own list in
    `locality` if one holds it, and among several such ranks from the one that has sent the least so
    far.

    Args:
        source: pieces of the first layout by global rank; no rank holds a slice twice.
        target: pieces of the second layout by global rank.
        itemsize: bytes of a number, on both sides.
        locality: disjoint lists of ranks with fast links between them; if it is empty, all links
            are treated alike.

    Raises:
        WeightError: no source rank holds a slice of the target.
    """
    locality_of = {rank: number for number, ranks in enumerate(locality) for rank in ranks}
    holders = _holders(source)
    sent: Counter[int] = Counter()

    moves: list[Move] = []
    copies: list[Move] = []
    aliases: list[Alias] = []
    for rank in sorted(target):
        source_parameters = _by_parameter(source.get(rank, ()))
        held_arrangements = {_arrangement(pieces) for pieces in source_parameters.values()}
        cost = _cost_to(rank, locality_of, sent)

        for parameter, pieces in _by_parameter(target[rank]).items():
            if _arrangement(pieces) in held_arrangements:
                aliases.append(Alias(rank, parameter, pieces))
                continue

            for piece in pieces:
                for move in _fetch(rank, piece, holders, cost):
                    if move.source_rank == rank:
                        copies.append(move)
                    else:
                        moves.append(move)
                        sent[move.source_rank] += move.elements

    minimum = {rank: itemsize * _lacking(source.get(rank, ()), target[rank]) for rank in target}
    return ReshardPlan(tuple(moves), tuple(copies), tuple(aliases), itemsize, minimum)


def split(move: Move, elements: int) -> list[Move]:
    """Cut a move into parts of at most `elements` numbers, or of one row if a row is larger."""
    rows = max(1, elements // _row(move.source))
    if move.stop - move.start <= rows:
        return [move]

    edges: list[int] = []
    for start, stop in pairwise(_edges(move, move.start, move.stop)):
        edges += range(start, stop, rows)
    edges.append(move.stop)
    return [replace(move, start=start, stop=stop) for start, stop in pairwise(edges)]


def _row(piece: Piece) -> int:
    """Numbers in one step along the piece's dimension."""
    return math.prod(piece.full_shape) // piece.full_shape[piece.dim]


def _by_parameter(pieces: Sequence[Piece]) -> dict[str, tuple[Piece, ...]]:
    assert len({piece.key for piece in pieces}) == len(pieces), "a rank holds a slice twice"
    parameters: dict[str, tuple[Piece, ...]] = {}
    for piece in pieces:
        parameters[piece.parameter] = (*parameters.get(piece.parameter, ()), piece)
    return parameters


def _arrangement(pieces: Sequence[Piece]) -> tuple[tuple[Key, int, int, int], ...]:
    """What decides where each number is stored; parameters with equal arrangements are equal."""
    return tuple((piece.key, piece.offset, piece.block, piece.period) for piece in pieces)


def _holders(source: Mapping[int, Sequence[Piece]]) -> dict[str, dict[Key, dict[int, Piece]]]:
    """For each tensor its slices, and for each slice the ranks that hold it and their pieces."""
    holders: dict[str, dict[Key, dict[int, Piece]]] = {}
    for rank in sorted(source):
        for piece in source[rank]:
            holders.setdefault(piece.name, {}).setdefault(piece.key, {})[rank] = piece
    return holders


def _cost_to(
    rank: int, locality_of: Mapping[int, int], sent: Counter[int]
) -> Callable[[tuple[int, Piece]], Cost]:
    """The cost by which `rank` chooses among the holders of a slice; it takes the lowest."""

    def cost(holder: tuple[int, Piece]) -> Cost:
        holder_rank, _ = holder
        is_other_rank = holder_rank != rank
        is_far = locality_of.get(holder_rank) != locality_of.get(rank)
        return (is_other_rank, is_far, sent[holder_rank], holder_rank)

    return cost


def _fetch(
    rank: int,
    piece: Piece,
    holders: Mapping[str, Mapping[Key, Mapping[int, Piece]]],
    cost: Callable[[tuple[int, Piece]], Cost],
) -> Iterator[Move]:
    """The moves that bring `piece` to `rank`; they end wherever a slice of some holder ends."""
    slices = holders.get(piece.name, {})
    edges = {piece.start, piece.stop}
    for _, _, first, last in slices:
        edges.update(edge for edge in (first, last) if piece.start < edge < piece.stop)

    for start, stop in pairwise(sorted(edges)):
        candidates: list[tuple[int, Piece]] = []
        for (_, dim, first, last), piece_on_rank in slices.items():
            if dim == piece.dim and first <= start and stop <= last:
                candidates += piece_on_rank.items()
        if not candidates:
            raise WeightError(
                f"no rank holds {piece.name}[{start}:{stop}]; source and target are of different "
                "models"
            )

        source_rank, held = min(candidates, key=cost)
        move = Move(source_rank, rank, held, piece, start, stop)
        if _is_viewable(held, start, stop) and _is_viewable(piece, start, stop):
            yield move
        else:
            for part_start, part_stop in pairwise(_edges(move, start, stop)):
                yield replace(move, start=part_start, stop=part_stop)


def _is_viewable(piece: Piece, start: int, stop: int) -> bool:
    """Whether the interval lies in one block of the piece or is made of whole blocks."""
    first = start - piece.start
    last = stop - piece.start
    is_in_one_block = first // piece.block == (last - 1) // piece.block
    is_whole_blocks = first % piece.block == 0 and last % piece.block == 0
    return is_in_one_block or is_whole_blocks


def _edges(move: Move, start: int, stop: int) -> list[int]:
    """`start`, the beginnings of the blocks of either piece in between, and `stop`."""
    block_starts = {
        *range(move.source.start, stop, move.source.block),
        *range(move.target.start, stop, move.target.block),
    }
    return [start, *sorted(edge for edge in block_starts if edge > start), stop]


def _lacking(held: Sequence[Piece], needed: Sequence[Piece]) -> int:
    """How many of the numbers in `needed` are not in `held`."""
    held_of_tensor: dict[str, list[Piece]] = {}
    for piece in held:
        held_of_tensor.setdefault(piece.name, []).append(piece)

    lacking = 0
    for piece in needed:
        rows = piece.stop - piece.start
        for own in held_of_tensor.get(piece.name, ()):
            common = min(piece.stop, own.stop) - max(piece.start, own.start)
            rows -= max(0, common)
        lacking += rows * _row(piece)
    return lacking
