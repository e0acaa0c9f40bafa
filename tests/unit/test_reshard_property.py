"""Reshard plans between random layouts, compared with parameters that are built row by row.

This test does not ask the weight map where a number belongs: it concatenates the parameters of both
sides from full tensors in which all numbers differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.reshard.moves import Move
from mrlhf.reshard.parcels import Parcel, parcels_of
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import Side, side_of_ranks
from mrlhf.weights.shard import Piece, Rule, local_shape, pieces_of
from tests.plans import plan_all

Arrays = dict[str, np.ndarray]
PARAMETERS = ("embedding", "norm", "qkv", "fc1", "proj")


@dataclass(frozen=True)
class Model:
    """Sizes of a model, odd ones too.

    Each of the `kv_heads` KV heads has `queries` query rows and `head` key rows.
    """

    vocabulary: int
    hidden: int
    kv_heads: int
    queries: int
    head: int
    ffn: int

    def tensors(self) -> Arrays:
        shapes = {
            "e": (self.vocabulary, self.hidden),
            "n": (self.hidden,),
            "q": (self.kv_heads * self.queries, self.hidden),
            "k": (self.kv_heads * self.head, self.hidden),
            "v": (self.kv_heads * self.head, self.hidden),
            "gate": (self.ffn, self.hidden),
            "up": (self.ffn, self.hidden),
            "o": (self.hidden, self.kv_heads * self.queries),
        }

        tensors: Arrays = {}
        first = 0
        for name, shape in shapes.items():
            tensors[name] = np.arange(first, first + np.prod(shape)).reshape(shape)
            first += tensors[name].size
        return tensors

    def rules(self, interleaved: bool, shared_kv_heads: int | None) -> dict[str, Rule]:
        return {
            "embedding": Rule(("e",), 0),
            "norm": Rule(("n",), None),
            "qkv": Rule(
                ("q", "k", "v"), 0, self.kv_heads if interleaved else None, shared_kv_heads
            ),
            "fc1": Rule(("gate", "up"), 0),
            "proj": Rule(("o",), 1),
        }

    def parameters(self, tp_rank: int, tp: int, interleaved: bool, whole_heads: bool) -> Arrays:
        """The parameters of tensor-parallel rank `tp_rank`, with padding as -1.

        With more ranks than KV heads, a rank has a whole KV head or an equal share of all rows.
        """
        full = self.tensors()
        rows = -(-self.vocabulary // tp)
        padding = np.full((rows * tp - self.vocabulary, self.hidden), -1)
        padded = np.concatenate([full["e"], padding])

        # The query rows of the rank, and the KV heads that they attend to, or its share of them.
        q = np.split(full["q"], tp)[tp_rank]
        first_head = tp_rank * self.kv_heads // tp
        heads = range(first_head, max(first_head + 1, (tp_rank + 1) * self.kv_heads // tp))
        k = [np.split(full["k"], self.kv_heads)[head] for head in heads]
        v = [np.split(full["v"], self.kv_heads)[head] for head in heads]
        if tp > self.kv_heads and not whole_heads:
            k = [np.split(full["k"], tp)[tp_rank]]
            v = [np.split(full["v"], tp)[tp_rank]]
        if interleaved:
            blocks: list[np.ndarray] = []
            for q_of_head, k_of_head, v_of_head in zip(np.split(q, len(heads)), k, v, strict=True):
                blocks += [q_of_head, k_of_head, v_of_head]
            qkv = np.concatenate(blocks)
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
    first_engine_rank: int
    machine: int
    interleaved: bool
    capacity: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [n for n in range(1, 9) if kv_heads % n == 0 or n % kv_heads == 0]
    tp = draw(st.sampled_from(sizes))
    engine_tp = draw(st.sampled_from(sizes))
    ranks_per_head = -(-tp // kv_heads)
    engine_ranks_per_head = -(-engine_tp // kv_heads)
    size = st.integers(1, 3)

    return Case(
        model=Model(
            vocabulary=draw(st.integers(1, 23)),
            hidden=draw(st.integers(1, 5)),
            kv_heads=kv_heads,
            queries=math.lcm(ranks_per_head, engine_ranks_per_head) * draw(size),
            head=ranks_per_head * draw(size),
            ffn=tp * engine_tp * draw(size),
        ),
        tp=tp,
        pp=draw(st.integers(1, 3)),
        dp=draw(st.integers(1, 2)),
        engine_tp=engine_tp,
        engine_ranks=engine_tp * draw(st.integers(1, 2)),
        first_engine_rank=draw(st.integers(0, 3)),
        machine=draw(st.sampled_from([0, 1, 2, 3, 4, 100])),
        interleaved=draw(st.booleans()),
        capacity=draw(st.sampled_from([1, 4, 16, 1000])),
    )


def _rows(piece: Piece, start: int, stop: int) -> np.ndarray:
    """The rows of the parameter that hold rows [start, stop) of the named tensor."""
    inside = np.arange(start, stop) - piece.start
    return inside // piece.block * piece.period + piece.offset + inside % piece.block


def _index(
    array: np.ndarray, piece: Piece, start: int, stop: int
) -> tuple[slice | np.ndarray, ...]:
    return (*[slice(None)] * piece.dim, _rows(piece, start, stop))


class Ranks:
    """Both sides of a case: pieces from the weight map, and arrays that are built by hand."""

    def __init__(self, case: Case) -> None:
        model = case.model
        shapes = {name: array.shape for name, array in model.tensors().items()}

        actor_rules = model.rules(True, None)
        self.case = case
        self.source: dict[int, list[Piece]] = {}
        self.have: dict[int, Arrays] = {}
        for rank in range(case.tp * case.pp * case.dp):
            tp_rank = rank % case.tp
            stage = rank // (case.tp * case.dp)
            names = [name for number, name in enumerate(PARAMETERS) if number % case.pp == stage]
            arrays = model.parameters(tp_rank, case.tp, interleaved=True, whole_heads=False)
            self.have[rank] = {name: arrays[name] for name in names}
            self.source[rank] = []
            for name in names:
                rule = actor_rules[name]
                self.source[rank] += pieces_of(name, rule, shapes, tp_rank, case.tp)
                assert local_shape(rule, shapes, case.tp) == arrays[name].shape

        engine_rules = model.rules(case.interleaved, model.kv_heads)
        self.target: dict[int, list[Piece]] = {}
        self.want: dict[int, Arrays] = {}
        for number in range(case.engine_ranks):
            rank = case.first_engine_rank + number
            tp_rank = number % case.engine_tp
            self.want[rank] = model.parameters(
                tp_rank, case.engine_tp, case.interleaved, whole_heads=True
            )
            self.target[rank] = []
            for name, array in self.want[rank].items():
                rule = engine_rules[name]
                self.target[rank] += pieces_of(name, rule, shapes, tp_rank, case.engine_tp)
                assert local_shape(rule, shapes, case.engine_tp) == array.shape

    def planner(self) -> Planner:
        """Plans from sides that count the replicas of each shard."""
        case = self.case
        first = case.first_engine_rank
        source = Side(
            shards=case.tp * case.pp,
            replicas=range(case.dp),
            place_of=lambda rank: _training_place(case, rank),
            rank_at=lambda shard, replica: (
                (shard // case.tp * case.dp + replica) * case.tp + shard % case.tp
            ),
            pieces=lambda shard: self.source[source.rank_at(shard, 0)],
        )
        target = Side(
            shards=case.engine_tp,
            replicas=range(case.engine_ranks // case.engine_tp),
            place_of=lambda rank: _engine_place(case, rank),
            rank_at=lambda shard, replica: first + replica * case.engine_tp + shard,
            pieces=lambda shard: self.target[first + shard],
        )
        return Planner(source, target, 4, self.near)

    def near(self, rank: int) -> range:
        """The ranks of a machine, if machines are told apart."""
        size = self.case.machine
        return range(rank // size * size, rank // size * size + size) if size else range(0)

    def lacking(self, rank: int) -> int:
        """How many numbers a rank needs and does not have."""
        needed = _numbers(self.want[rank]) - {-1}
        return len(needed - _numbers(self.have.get(rank, {})))


def _training_place(case: Case, rank: int) -> tuple[int, int] | None:
    others, tp_rank = divmod(rank, case.tp)
    stage, replica = divmod(others, case.dp)
    return (stage * case.tp + tp_rank, replica) if stage < case.pp else None


def _engine_place(case: Case, rank: int) -> tuple[int, int] | None:
    number = rank - case.first_engine_rank
    replica, shard = divmod(number, case.engine_tp)
    return (shard, replica) if 0 <= number < case.engine_ranks else None


def _numbers(arrays: Arrays) -> set[int]:
    numbers: set[int] = set()
    for array in arrays.values():
        numbers.update(array.ravel().tolist())
    return numbers


class Received:
    """What the ranks have received: the numbers, and how often each was written."""

    def __init__(self, want: Mapping[int, Arrays]) -> None:
        self.numbers: dict[int, Arrays] = {}
        self.times: dict[int, Arrays] = {}
        for rank, arrays in want.items():
            self.numbers[rank] = {name: np.full_like(a, -1) for name, a in arrays.items()}
            self.times[rank] = {name: np.zeros_like(a) for name, a in arrays.items()}

    def write(self, move: Move, values: np.ndarray) -> None:
        array = self.numbers[move.target_rank][move.target.parameter]
        index = _index(array, move.target, move.start, move.stop)
        array[index] = values
        self.times[move.target_rank][move.target.parameter][index] += 1


def _sent(have: Mapping[int, Arrays], move: Move) -> np.ndarray:
    """The numbers of a move, as its source rank holds them."""
    array = have[move.source_rank][move.source.parameter]
    return array[_index(array, move.source, move.start, move.stop)]


def _pack(parcel: Parcel, have: Mapping[int, Arrays]) -> np.ndarray:
    """The numbers of a parcel; each place is filled once."""
    packed = np.full(parcel.elements, -2)
    for packed_slice in parcel.slices:
        values = _sent(have, packed_slice.moves[0])
        place = slice(packed_slice.offset, packed_slice.offset + values.size)
        assert (packed[place] == -2).all()
        packed[place] = values.ravel()
    assert (packed != -2).all()
    return packed


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_every_number_arrives_once_and_no_byte_is_wasted(case: Case) -> None:
    ranks = Ranks(case)
    everyone = sorted({*ranks.source, *ranks.target})
    _check(ranks, ranks.planner(), everyone)
    # The same ranks, described one by one.
    listed = Planner(side_of_ranks(ranks.source), side_of_ranks(ranks.target), 4, ranks.near)
    _check(ranks, listed, everyone)


def _check(ranks: Ranks, planner: Planner, everyone: Sequence[int]) -> None:
    """Carry out the plans of all ranks, and count what arrives."""
    whole = plan_all(planner, everyone)
    received = Received(ranks.want)

    for rank, alias in whole.aliases:
        key = alias.pieces[0].key
        (name,) = {piece.parameter for piece in ranks.source[rank] if piece.key == key}
        wanted = ranks.want[rank][alias.parameter]
        received.numbers[rank][alias.parameter][...] = ranks.have[rank][name]
        received.times[rank][alias.parameter] += wanted >= 0

    for copy in whole.copies:
        received.write(copy, _sent(ranks.have, copy))

    elements_received = dict.fromkeys(ranks.want, 0)
    for plan in whole.plans.values():
        for parcel in parcels_of(plan.sends, ranks.case.capacity):
            packed = _pack(parcel, ranks.have)
            for packed_slice in parcel.slices:
                for move in packed_slice.moves:
                    flat = packed[packed_slice.offset :][: move.elements]
                    received.write(move, flat.reshape(move.source.shape(move.start, move.stop)))
                    elements_received[move.target_rank] += flat.size

    for rank, arrays in ranks.want.items():
        for name, array in arrays.items():
            assert np.array_equal(received.numbers[rank][name], array), (rank, name)
            assert np.array_equal(received.times[rank][name], array >= 0), (rank, name)
        assert elements_received[rank] == ranks.lacking(rank)
        assert whole.minimum[rank] == 4 * ranks.lacking(rank)
