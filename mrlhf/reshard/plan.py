"""Which bytes travel from which rank to which, so that every rank holds the pieces that a second
layout gives it.

    aliases   a target parameter made of exactly the pieces of a source parameter on the same rank:
    nothing is copied copies    slices that the rank holds already, in another arrangement moves
    the rest: each byte that a rank needs and does not hold crosses one link, once

Pure and deterministic, so every rank derives the same plan alone. It knows pieces and ranks; it
does not know models, tensors or process groups. The work grows with the ranks that it is given: one
model-parallel group is enough where the target's replicas lie inside such groups.
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
    """The interval [start, stop) of a named tensor, from a piece on one rank to a piece on another
    or on the same.

    On both sides the interval lies in one block or is made of whole blocks, as `Slot.view` asks.
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
    """A target parameter that a rank takes over as it is: its pieces are those of one source
    parameter, in place.
    """

    rank: int
    parameter: str
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        """Numbers in the parameter, padding excepted."""
        return sum((piece.stop - piece.start) * _row(piece) for piece in self.pieces)


@dataclass(frozen=True)
class ReshardPlan:
    """All that happens, on all ranks, in an order that they share.

    Attributes:
        moves: slices that cross a link.
        copies: slices that are copied on their rank.
        aliases: parameters that are shared.
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
        """Bytes that cross links."""
        return self.itemsize * sum(move.elements for move in self.moves)

    @property
    def bytes_minimum(self) -> int:
        """Bytes that any plan has to move."""
        return sum(self.minimum.values())

    @property
    def bytes_local(self) -> int:
        """Bytes copied on their rank."""
        return self.itemsize * sum(copy.elements for copy in self.copies)

    @property
    def bytes_aliased(self) -> int:
        """Bytes of the target that share storage with the source."""
        return self.itemsize * sum(alias.elements for alias in self.aliases)


def plan(
    source: Mapping[int, Sequence[Piece]],
    target: Mapping[int, Sequence[Piece]],
    itemsize: int,
    locality: Sequence[Sequence[int]] = (),
) -> ReshardPlan:
    """Plan the way from the pieces that each rank has to the pieces that each rank shall have.

    A rank takes what it holds itself; among other holders one of its own group in `locality` goes
    before any other, and then the one that has sent the least so far.

    Args:
        source: pieces by global rank; no rank holds a slice twice.
        target: the same, of the other layout.
        itemsize: bytes of a number, on both sides.
        locality: disjoint lists of ranks with fast links between them; where empty, all ranks are
            alike.

    Raises:
        WeightError: a slice of the target is held by no source rank.
    """
    group_of = {rank: number for number, ranks in enumerate(locality) for rank in ranks}
    holders = _holders(source)
    sent: Counter[int] = Counter()
    here: list[Move] = []
    across: list[Move] = []
    aliases: list[Alias] = []
    for rank in sorted(target):
        arrangements = {
            _arrangement(pieces) for pieces in _by_parameter(source.get(rank, ())).values()
        }
        cost = _cost_to(rank, group_of, sent)
        for parameter, pieces in _by_parameter(target[rank]).items():
            if _arrangement(pieces) in arrangements:
                aliases.append(Alias(rank, parameter, pieces))
                continue
            for move in (move for piece in pieces for move in _fetch(rank, piece, holders, cost)):
                if move.source_rank == rank:
                    here.append(move)
                else:
                    across.append(move)
                    sent[move.source_rank] += move.elements
    minimum = {rank: itemsize * _lacking(source.get(rank, ()), target[rank]) for rank in target}
    return ReshardPlan(tuple(across), tuple(here), tuple(aliases), itemsize, minimum)


def split(move: Move, elements: int) -> list[Move]:
    """Cut a move in parts of at most `elements` numbers each, or of one row where a row is longer."""
    rows = max(1, elements // _row(move.source))
    if move.stop - move.start <= rows:
        return [move]
    blocks = pairwise(_edges(move, move.start, move.stop))
    cuts = [cut for start, stop in blocks for cut in range(start, stop, rows)]
    return [replace(move, start=start, stop=stop) for start, stop in pairwise([*cuts, move.stop])]


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
    """All about a parameter but its name; where two agree, the stored numbers do, one for one."""
    return tuple((piece.key, piece.offset, piece.block, piece.period) for piece in pieces)


def _holders(source: Mapping[int, Sequence[Piece]]) -> dict[str, dict[Key, dict[int, Piece]]]:
    """For each tensor its slices, and for each slice the piece by which each rank holds it."""
    holders: dict[str, dict[Key, dict[int, Piece]]] = {}
    for rank in sorted(source):
        for piece in source[rank]:
            holders.setdefault(piece.name, {}).setdefault(piece.key, {})[rank] = piece
    return holders


def _cost_to(
    rank: int, group_of: Mapping[int, int], sent: Counter[int]
) -> Callable[[tuple[int, Piece]], Cost]:
    """What to compare among the holders of a slice that `rank` needs; the least is taken."""

    def cost(holder: tuple[int, Piece]) -> Cost:
        return (
            holder[0] != rank,
            group_of.get(holder[0]) != group_of.get(rank),
            sent[holder[0]],
            holder[0],
        )

    return cost


def _fetch(
    rank: int,
    piece: Piece,
    holders: Mapping[str, Mapping[Key, Mapping[int, Piece]]],
    cost: Callable[[tuple[int, Piece]], Cost],
) -> Iterator[Move]:
    """The moves that bring `piece` to `rank`, cut wherever a slice that some rank holds begins or
    ends.
    """
    slices = holders.get(piece.name, {})
    edges = {
        edge
        for _, _, start, stop in slices
        for edge in (start, stop)
        if piece.start < edge < piece.stop
    }
    for start, stop in pairwise(sorted({piece.start, piece.stop} | edges)):
        candidates = [
            holder
            for (_, dim, first, last), by_rank in slices.items()
            if dim == piece.dim and first <= start and stop <= last
            for holder in by_rank.items()
        ]
        if not candidates:
            raise WeightError(
                f"no rank holds {piece.name}[{start}:{stop}]; source and target are of different models"
            )
        source_rank, held = min(candidates, key=cost)
        move = Move(source_rank, rank, held, piece, start, stop)
        if _is_viewable(held, start, stop) and _is_viewable(piece, start, stop):
            yield move
        else:
            yield from (
                replace(move, start=a, stop=b) for a, b in pairwise(_edges(move, start, stop))
            )


def _is_viewable(piece: Piece, start: int, stop: int) -> bool:
    """Whether the interval lies in one block of the piece or is made of whole blocks."""
    first, last = start - piece.start, stop - piece.start
    return first // piece.block == (last - 1) // piece.block or (
        first % piece.block == 0 and last % piece.block == 0
    )


def _edges(move: Move, start: int, stop: int) -> list[int]:
    """`start`, each beginning of a block of either piece in between, and `stop`."""
    inner = {
        edge
        for piece in (move.source, move.target)
        for edge in range(piece.start, stop, piece.block)
    }
    return [start, *sorted(edge for edge in inner if edge > start), stop]


def _lacking(held: Sequence[Piece], needed: Sequence[Piece]) -> int:
    """Numbers in `needed` that are not in `held`: the size of the one less what each pair has in
    common.
    """
    by_name: dict[str, list[Piece]] = {}
    for piece in held:
        by_name.setdefault(piece.name, []).append(piece)
    rows = 0
    for piece in needed:
        common = (
            min(piece.stop, own.stop) - max(piece.start, own.start)
            for own in by_name.get(piece.name, ())
        )
        rows += _row(piece) * (piece.stop - piece.start - sum(max(0, n) for n in common))
    return rows
