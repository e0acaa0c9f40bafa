"""Reshard plans between layouts drawn at random, against parameters put together row by row.

Nothing here asks the weight map where a number belongs: the parameters of both sides are
concatenated by hand from full tensors in which every number is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.reshard.chunks import chunks_of
from mrlhf.reshard.plan import Move, plan
from mrlhf.weights.shard import Piece, Rule, local_shape, pieces_of

Arrays = dict[str, np.ndarray]
PARAMETERS = ("embedding", "norm", "qkv", "fc1", "proj")


@dataclass(frozen=True)
class Model:
    """Sizes, odd ones too; `groups` KV heads, each with `queries` query rows and `head` key rows."""

    vocabulary: int
    hidden: int
    groups: int
    queries: int
    head: int
    ffn: int

    def tensors(self) -> Arrays:
        shapes = {
            "e": (self.vocabulary, self.hidden),
            "n": (self.hidden,),
            "q": (self.groups * self.queries, self.hidden),
            "k": (self.groups * self.head, self.hidden),
            "v": (self.groups * self.head, self.hidden),
            "gate": (self.ffn, self.hidden),
            "up": (self.ffn, self.hidden),
            "o": (self.hidden, self.groups * self.queries),
        }
        tensors, first = {}, 0
        for name, shape in shapes.items():
            tensors[name] = np.arange(first, first + np.prod(shape)).reshape(shape)
            first += tensors[name].size
        return tensors

    def rules(self, interleaved: bool, shares: int | None) -> dict[str, Rule]:
        return {
            "embedding": Rule(("e",), 0),
            "norm": Rule(("n",), None),
            "qkv": Rule(("q", "k", "v"), 0, self.groups if interleaved else None, shares),
            "fc1": Rule(("gate", "up"), 0),
            "proj": Rule(("o",), 1),
        }

    def parameters(self, tp_rank: int, tp: int, interleaved: bool) -> Arrays:
        """What tensor-parallel rank `tp_rank` stores, padding as -1."""
        full = self.tensors()
        rows = -(-self.vocabulary // tp)
        padded = np.concatenate(
            [full["e"], np.full((rows * tp - self.vocabulary, self.hidden), -1)]
        )
        # Each rank's query rows, and the KV heads that they look at.
        heads = range(
            tp_rank * self.groups // tp,
            max(tp_rank * self.groups // tp + 1, (tp_rank + 1) * self.groups // tp),
        )
        q = np.split(full["q"], tp)[tp_rank]
        k, v = ([np.split(full[name], self.groups)[head] for head in heads] for name in "kv")
        if interleaved:
            parts = zip(np.split(q, len(heads)), k, v, strict=True)
            qkv = np.concatenate([block for group in parts for block in group])
        else:
            qkv = np.concatenate([q, *k, *v])
        halves = [np.split(full[name], tp)[tp_rank] for name in ("gate", "up")]
        return {
            "embedding": padded[tp_rank * rows : (tp_rank + 1) * rows],
            "norm": full["n"],
            "qkv": qkv,
            "fc1": np.concatenate(halves),
            "proj": np.split(full["o"], tp, axis=1)[tp_rank],
        }


@dataclass(frozen=True)
class Case:
    model: Model
    tp: int
    pp: int
    dp: int
    engine_tp: int
    engine_ranks: int
    interleaved: bool
    capacity: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.sampled_from([1, 2, 3, 4, 6]))
    tp = draw(st.sampled_from([n for n in range(1, groups + 1) if groups % n == 0]))
    engine_tp = draw(
        st.sampled_from([n for n in range(1, 9) if groups % n == 0 or n % groups == 0])
    )
    per_group = -(-engine_tp // groups)
    size = st.integers(1, 3)
    return Case(
        model=Model(
            vocabulary=draw(st.integers(1, 23)),
            hidden=draw(st.integers(1, 5)),
            groups=groups,
            queries=per_group * draw(size),
            head=draw(size),
            ffn=tp * engine_tp * draw(size),
        ),
        tp=tp,
        pp=draw(st.integers(1, 3)),
        dp=draw(st.integers(1, 2)),
        engine_tp=engine_tp,
        engine_ranks=engine_tp * draw(st.integers(1, 2)),
        interleaved=draw(st.booleans()),
        capacity=draw(st.sampled_from([1, 4, 16, 1000])),
    )


def _rows(piece: Piece, start: int, stop: int) -> np.ndarray:
    """Where rows [start, stop) of the named tensor lie in the parameter."""
    inside = np.arange(start, stop) - piece.start
    return inside // piece.block * piece.period + piece.offset + inside % piece.block


def _at(array: np.ndarray, piece: Piece, start: int, stop: int) -> tuple[slice | np.ndarray, ...]:
    return (*[slice(None)] * piece.dim, _rows(piece, start, stop))


class Ranks:
    """Both sides of a case: the pieces as the weight map tells them, the arrays as put together by
    hand.
    """

    def __init__(self, case: Case) -> None:
        model, shapes = (
            case.model,
            {name: array.shape for name, array in case.model.tensors().items()},
        )
        trained, served = model.rules(True, None), model.rules(case.interleaved, model.groups)
        self.source: dict[int, list[Piece]] = {}
        self.target: dict[int, list[Piece]] = {}
        self.have: dict[int, Arrays] = {}
        self.want: dict[int, Arrays] = {}
        for rank in range(case.tp * case.pp * case.dp):
            tp_rank, stage = rank % case.tp, rank // (case.tp * case.dp)
            mine = [name for number, name in enumerate(PARAMETERS) if number % case.pp == stage]
            arrays = model.parameters(tp_rank, case.tp, interleaved=True)
            self.have[rank] = {name: arrays[name] for name in mine}
            self.source[rank] = [
                p for n in mine for p in pieces_of(n, trained[n], shapes, tp_rank, case.tp)
            ]
        for rank in range(case.engine_ranks):
            tp_rank = rank % case.engine_tp
            self.want[rank] = model.parameters(tp_rank, case.engine_tp, case.interleaved)
            self.target[rank] = [
                p
                for n in PARAMETERS
                for p in pieces_of(n, served[n], shapes, tp_rank, case.engine_tp)
            ]
            for name, array in self.want[rank].items():
                assert local_shape(served[name], shapes, case.engine_tp) == array.shape

    def lacking(self, rank: int) -> int:
        """Numbers that a rank needs and does not have."""
        needed = {n for array in self.want[rank].values() for n in array.ravel().tolist()} - {-1}
        return len(
            needed
            - {n for array in self.have.get(rank, {}).values() for n in array.ravel().tolist()}
        )


def _write(
    got: Mapping[int, Arrays], times: Mapping[int, Arrays], move: Move, values: np.ndarray
) -> None:
    where = _at(got[move.target_rank][move.target.parameter], move.target, move.start, move.stop)
    got[move.target_rank][move.target.parameter][where] = values
    times[move.target_rank][move.target.parameter][where] += 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_every_number_arrives_once_and_no_byte_is_wasted(case: Case) -> None:
    ranks = Ranks(case)
    found = plan(ranks.source, ranks.target, itemsize=4)
    got = {
        rank: {name: np.full_like(a, -1) for name, a in arrays.items()}
        for rank, arrays in ranks.want.items()
    }
    times = {
        rank: {name: np.zeros_like(a) for name, a in arrays.items()}
        for rank, arrays in ranks.want.items()
    }
    for alias in found.aliases:
        (parameter,) = {
            piece.parameter
            for piece in ranks.source[alias.rank]
            if piece.key == alias.pieces[0].key
        }
        got[alias.rank][alias.parameter][...] = ranks.have[alias.rank][parameter]
        times[alias.rank][alias.parameter] += ranks.want[alias.rank][alias.parameter] >= 0
    for copy in found.copies:
        held = ranks.have[copy.source_rank][copy.source.parameter]
        _write(got, times, copy, held[_at(held, copy.source, copy.start, copy.stop)])
    received = dict.fromkeys(ranks.want, 0)
    for sender in ranks.source:
        for chunk in chunks_of(
            [move for move in found.moves if move.source_rank == sender], case.capacity
        ):
            packed = np.full(chunk.elements, -2)
            for packed_slice in chunk.slices:
                move = packed_slice.moves[0]
                held = ranks.have[sender][move.source.parameter]
                values = held[_at(held, move.source, move.start, move.stop)]
                assert (packed[packed_slice.offset :][: values.size] == -2).all()
                packed[packed_slice.offset :][: values.size] = values.ravel()
            assert (packed != -2).all()
            for packed_slice in chunk.slices:
                for move in packed_slice.moves:
                    flat = packed[packed_slice.offset :][: move.elements]
                    _write(got, times, move, flat.reshape(move.source.shape(move.start, move.stop)))
                    received[move.target_rank] += flat.size
    for rank, arrays in ranks.want.items():
        for name, array in arrays.items():
            assert np.array_equal(got[rank][name], array), (rank, name)
            assert np.array_equal(times[rank][name], array >= 0), (rank, name)
        assert received[rank] == ranks.lacking(rank)
        assert found.minimum[rank] == 4 * ranks.lacking(rank)
