"""Plans which slices travel from which rank to which, to bring weights into another layout.

A plan is what concerns one rank:

- aliases: the target parameter has exactly the pieces of a source parameter on the same rank, so
  nothing is copied;
- copies: the rank already holds the slice, in another arrangement;
- receives: all other slices that it needs. Each byte that a rank needs and does not hold crosses
  one link, once;
- sends: what other ranks receive from it.

Planning is pure and deterministic, so every rank plans alone, and what one rank plans to send to
another is what the other plans to receive from it, in the same order. Time and memory grow with the
number of different shards and not with the number of ranks. This file knows pieces and ranks; it
does not know models, tensors or process groups.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mrlhf.reshard.choice import Demand, NearRanks, SenderChoice
from mrlhf.reshard.intervals import HeldIntervals, Interval, shards_by_slice
from mrlhf.reshard.moves import Move, numbers_in_row
from mrlhf.reshard.sides import Side, Sides
from mrlhf.weights.shard import Key, Piece


@dataclass(frozen=True)
class Alias:
    """A target parameter that shares the storage of a source parameter with the same pieces."""

    parameter: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """The part of one rank in a reshard."""

    rank: int
    receives: tuple[Move, ...]  # slices that come from other ranks
    sends: tuple[Move, ...]  # slices that other ranks receive from this one, by their rank
    copies: tuple[Move, ...]  # slices that are copied within the rank
    aliases: tuple[Alias, ...]  # parameters that share storage
    itemsize: int  # bytes of a number
    bytes_minimum: int  # needed and not held, by the layouts and not by `receives`

    @property
    def bytes_received(self) -> int:
        """Bytes that come from other ranks."""
        return self.itemsize * sum(move.elements for move in self.receives)

    @property
    def bytes_copied(self) -> int:
        """Bytes copied within the rank."""
        return self.itemsize * sum(copy.elements for copy in self.copies)

    @property
    def sends_by_peer(self) -> dict[int, list[Move]]:
        """The moves from this rank, by the rank that receives them."""
        links: dict[int, list[Move]] = {}
        for move in self.sends:
            links.setdefault(move.target_rank, []).append(move)
        return links

    @property
    def receives_by_peer(self) -> dict[int, list[Move]]:
        """The moves to this rank, by the rank that sends them."""
        links: dict[int, list[Move]] = {}
        for move in self.receives:
            links.setdefault(move.source_rank, []).append(move)
        return links


class Planner:
    """Plans for any rank how to get from the pieces of one side to those of another."""

    def __init__(
        self, sides: Sequence[Sides], itemsize: int, near: NearRanks = lambda rank: ()
    ) -> None:
        """Find out which shard of `sides`, one pair for each kind of weights, holds which slice.

        `itemsize` are the bytes of a number. `near` is as in `SenderChoice`.
        """
        self._itemsize = itemsize
        with _without_collector():
            self._kinds = [_KindPlanner(source, target, near) for source, target in sides]

    def plan(self, rank: int) -> ReshardPlan:
        """Plan for global rank `rank`; WeightError if nobody holds a slice of the target."""
        receives: list[Move] = []
        copies: list[Move] = []
        aliases: list[Alias] = []
        lacking = 0
        with _without_collector():
            for kind in self._kinds:
                for step in kind.steps(rank):
                    if isinstance(step, Alias):
                        aliases.append(step)
                    elif step.source_rank == rank:
                        copies.append(step)
                    else:
                        receives.append(step)
                lacking += kind.lacking(rank)

            # Receiver by receiver. The moves to one receiver keep the order in which it plans to
            # receive them.
            sends = [move for kind in self._kinds for move in kind.sends(rank)]
            sends.sort(key=lambda move: move.target_rank)

        return ReshardPlan(
            rank, tuple(receives), tuple(sends), tuple(copies), tuple(aliases), self._itemsize,
            self._itemsize * lacking,
        )  # fmt: skip


class _KindPlanner:
    """Plans for the weights of one kind."""

    def __init__(self, source: Side, target: Side, near: NearRanks) -> None:
        self._source = source
        self._target = target
        self._held = HeldIntervals(source)
        self._receivers = shards_by_slice(target, self._held.shared)
        self._choice = SenderChoice(source, target, near)

    def steps(self, rank: int) -> Iterator[Alias | Move]:
        """How the parameters of a rank get their weights, parameter by parameter."""
        held = self._pieces(self._source, rank)
        needed = self._pieces(self._target, rank)
        own_shard = self._source.shard_of(rank)
        place = self._target.shard_of(rank)
        arrangements = {_arrangement(pieces) for pieces in _by_parameter(held).values()}

        for parameter, pieces in _by_parameter(needed).items():
            if _arrangement(pieces) in arrangements:
                yield Alias(parameter, pieces)
                continue
            for piece in pieces:
                assert place is not None
                yield from self._fetch(rank, own_shard, place, piece)

    def lacking(self, rank: int) -> int:
        """How many numbers a rank needs and does not hold, counted from the layouts alone."""
        held: dict[str, list[Piece]] = {}
        for piece in self._pieces(self._source, rank):
            held.setdefault(piece.name, []).append(piece)

        lacking = 0
        for piece in self._pieces(self._target, rank):
            rows = piece.stop - piece.start
            for own in held.get(piece.name, ()):
                rows -= max(0, min(piece.stop, own.stop) - max(piece.start, own.start))
            lacking += rows * numbers_in_row(piece)
        return lacking

    def sends(self, rank: int) -> Iterator[Move]:
        """The moves from a rank; to each receiver in the order in which that plans them."""
        own_shard = self._source.shard_of(rank)
        if own_shard is None:
            return
        names = {piece.name for piece in self._source.pieces(own_shard)}

        for shard in range(self._target.shards):
            for piece in self._target.pieces_of(shard, names):
                for interval in self._held.within(piece):
                    if own_shard not in interval.held:
                        continue
                    demand = self._demand(shard, piece, interval)
                    for receiver in self._choice.receivers_from(rank, shard, demand):
                        yield from interval.moves(rank, own_shard, receiver, piece)

    def _fetch(self, rank: int, own_shard: int | None, place: int, piece: Piece) -> Iterator[Move]:
        """The moves that bring `piece` to `rank`; they end wherever a slice of some shard ends."""
        for interval in self._held.within(piece):
            sender = rank
            shard = own_shard
            if own_shard not in interval.held:
                sender = self._choice.sender_to(rank, self._demand(place, piece, interval))
                shard = self._source.shard_of(sender)
            assert shard is not None, "a rank outside the source's side was chosen to send"
            yield from interval.moves(sender, shard, rank, piece)

    def _demand(self, shard: int, piece: Piece, interval: Interval) -> Demand:
        """Target shard `shard` needs the slice; who else does matters where there is a choice."""
        receivers = self._receivers[piece.key] if piece.name in self._held.shared else (shard,)
        return Demand(tuple(interval.held), receivers, interval.turn)

    @staticmethod
    def _pieces(side: Side, rank: int) -> Sequence[Piece]:
        shard = side.shard_of(rank)
        return () if shard is None else side.pieces(shard)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the garbage collector, which walks through all parts of a plan for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _by_parameter(pieces: Sequence[Piece]) -> dict[str, tuple[Piece, ...]]:
    assert len({piece.key for piece in pieces}) == len(pieces), "a rank holds a slice twice"
    parameters: dict[str, tuple[Piece, ...]] = {}
    for piece in pieces:
        parameters[piece.parameter] = (*parameters.get(piece.parameter, ()), piece)
    return parameters


def _arrangement(pieces: Sequence[Piece]) -> tuple[tuple[Key, int, int, int], ...]:
    """The facts that decide where each number is stored; equal ones make parameters equal."""
    return tuple((piece.key, piece.offset, piece.block, piece.period) for piece in pieces)
