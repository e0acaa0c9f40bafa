"""Reshard plans between random layouts, compared with parameters that are built row by row.

This test does not ask the weight map where a number belongs: it concatenates the parameters of both
sides from full tensors in which all numbers differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.moves import Move, split
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import Side, Sides, sides_around
from mrlhf.weights.shard import Piece, Rule, local_shape, pieces_of
from tests.plans import WholePlan, check_agreement, plan_all, side_of_ranks

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Part:
    """Which part of `of` parts."""

    number: int
    of: int


@dataclass(frozen=True)
class Place:
    """What a rank holds: its parts of the dense weights, the experts, each of them, the layers."""

    tp: Part
    ep: Part
    etp: Part
    pp: Part = Part(0, 1)


@dataclass(frozen=True)
class Model:
    """Sizes of a model, odd ones too.

    Each of the `kv_heads` KV heads has `queries` query rows and `head` key rows. Each of the
    experts, if there are any, has an MLP of `width`.
    """

    vocabulary: int
    hidden: int
    kv_heads: int
    queries: int
    head: int
    ffn: int
    experts: int
    width: int

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
        for expert in range(self.experts):
            shapes[f"gate {expert}"] = (self.width, self.hidden)
            shapes[f"up {expert}"] = (self.width, self.hidden)
            shapes[f"down {expert}"] = (self.hidden, self.width)

        tensors: Arrays = {}
        first = 0
        for name, shape in shapes.items():
            tensors[name] = np.arange(first, first + np.prod(shape)).reshape(shape)
            first += tensors[name].size
        return tensors

    def rules(
        self, interleaved: bool, shared_kv_heads: int | None, mlp_blocks: int | None = None
    ) -> dict[str, Rule]:
        rules = {
            "embedding": Rule(("e",), 0),
            "norm": Rule(("n",), None),
            "qkv": Rule(
                ("q", "k", "v"), 0, self.kv_heads if interleaved else None, shared_kv_heads
            ),
            "fc1": Rule(("gate", "up"), 0, mlp_blocks),
            "proj": Rule(("o",), 1),
        }
        for expert in range(self.experts):
            gate_up = (f"gate {expert}", f"up {expert}")
            rules[f"fc1 {expert}"] = Rule(gate_up, 0, of_expert=True)
            rules[f"fc2 {expert}"] = Rule((f"down {expert}",), 1, of_expert=True)
        return rules

    def parameters(
        self, place: Place, interleaved: bool, whole_heads: bool, mlp_blocks: int
    ) -> Arrays:
        """The parameters of the rank at `place`."""
        arrays = self.dense(place.tp.number, place.tp.of, interleaved, whole_heads)
        arrays["fc1"] = self.gate_and_up(place.tp, mlp_blocks)
        held = self.experts // place.ep.of
        for expert in range(place.ep.number * held, (place.ep.number + 1) * held):
            arrays |= self.expert(expert, place.etp)
        return {
            name: array
            for name, array in arrays.items()
            if list(self.rules(False, None)).index(name) % place.pp.of == place.pp.number
        }

    def dense(self, tp_rank: int, tp: int, interleaved: bool, whole_heads: bool) -> Arrays:
        """The dense parameters of tensor-parallel rank `tp_rank`, with padding as -1.

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

        return {
            "embedding": padded[tp_rank * rows : (tp_rank + 1) * rows],
            "norm": full["n"],
            "qkv": qkv,
            "proj": np.split(full["o"], tp, axis=1)[tp_rank],
        }

    def gate_and_up(self, part: Part, blocks: int) -> np.ndarray:
        """The rank's blocks of so many, each with rows of both tensors."""
        full = self.tensors()
        both = zip(np.split(full["gate"], blocks), np.split(full["up"], blocks), strict=True)
        joined = [np.concatenate(block) for block in both]
        own = blocks // part.of
        return np.concatenate(joined[part.number * own : (part.number + 1) * own])

    def expert(self, expert: int, part: Part) -> Arrays:
        """A part of one expert."""
        full = self.tensors()
        halves = [np.split(full[f"{name} {expert}"], part.of) for name in ("gate", "up")]
        down = np.split(full[f"down {expert}"], part.of, axis=1)
        return {
            f"fc1 {expert}": np.concatenate([half[part.number] for half in halves]),
            f"fc2 {expert}": down[part.number],
        }


@dataclass(frozen=True)
class Case:
    model: Model
    actor: ParallelLayout
    engine_tp: int
    engine_ep: int
    engine_ranks: int
    first_engine_rank: int
    machine: int
    interleaved: bool
    mlp_blocks: tuple[int, int]  # of gate and up in one tensor, in training and in an engine
    capacity: int

    @property
    def expert_block(self) -> int:
        """How many ranks of a stage, one after another, hold all experts."""
        return self.actor.etp * self.actor.ep

    @property
    def stage_ranks(self) -> int:
        return self.actor.tp * self.actor.cp * self.actor.dp

    def engine_place(self, tp_rank: int) -> Place:
        etp = self.engine_tp // self.engine_ep
        return Place(
            tp=Part(tp_rank, self.engine_tp),
            ep=Part(tp_rank // etp, self.engine_ep),
            etp=Part(tp_rank % etp, etp),
        )

    def actor_place(self, rank: int) -> Place:
        stage, in_stage = divmod(rank, self.stage_ranks)
        ep, etp = divmod(in_stage % self.expert_block, self.actor.etp)
        return Place(
            tp=Part(in_stage % self.actor.tp, self.actor.tp),
            ep=Part(ep, self.actor.ep),
            etp=Part(etp, self.actor.etp),
            pp=Part(stage, self.actor.pp),
        )

    def near(self, rank: int) -> range:
        """The ranks of a machine, if machines are told apart."""
        size = self.machine
        return range(rank // size * size, rank // size * size + size) if size else range(0)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    sizes = [n for n in range(1, 9) if kv_heads % n == 0 or n % kv_heads == 0]
    tp = draw(st.sampled_from(sizes))
    engine_tp = draw(st.sampled_from(sizes))
    ranks_per_head = -(-tp // kv_heads)
    engine_ranks_per_head = -(-engine_tp // kv_heads)
    size = st.integers(1, 3)

    cp = draw(st.integers(1, 2))
    dp = draw(st.integers(1, 2))
    block = draw(st.sampled_from(_divisors(tp * cp * dp)))
    etp = draw(st.sampled_from(_divisors(block)))
    ep = block // etp
    engine_ep = draw(st.sampled_from(_divisors(engine_tp)))

    ffn = tp * engine_tp * draw(size)
    mlp_blocks = [
        ranks * draw(st.sampled_from(_divisors(ffn // ranks))) for ranks in (tp, engine_tp)
    ]

    return Case(
        model=Model(
            vocabulary=draw(st.integers(1, 23)),
            hidden=draw(st.integers(1, 5)),
            kv_heads=kv_heads,
            queries=math.lcm(ranks_per_head, engine_ranks_per_head) * draw(size),
            head=ranks_per_head * draw(size),
            ffn=ffn,
            experts=math.lcm(ep, engine_ep) * draw(st.integers(0, 2)),
            width=math.lcm(etp, engine_tp // engine_ep) * draw(st.integers(1, 2)),
        ),
        actor=ParallelLayout(tp=tp, cp=cp, pp=draw(st.integers(1, 3)), dp=dp, ep=ep, etp=etp),
        engine_tp=engine_tp,
        engine_ep=engine_ep,
        engine_ranks=engine_tp * draw(st.integers(1, 2)),
        first_engine_rank=draw(st.integers(0, 3)),
        machine=draw(st.sampled_from([0, 1, 2, 3, 4, 100])),
        interleaved=draw(st.booleans()),
        mlp_blocks=(mlp_blocks[0], mlp_blocks[1]),
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

    def __init__(self, case: Case, engine_places: Mapping[int, Place]) -> None:
        model = case.model
        self._shapes = {name: array.shape for name, array in model.tensors().items()}
        self.case = case
        self.source: dict[int, list[Piece]] = {}
        self.have: dict[int, Arrays] = {}
        actor_blocks, engine_blocks = case.mlp_blocks
        actor_rules = model.rules(True, None, actor_blocks)
        for rank in range(case.actor.world_size):
            place = case.actor_place(rank)
            self.have[rank] = model.parameters(place, True, False, actor_blocks)
            self.source[rank] = self._pieces(actor_rules, place, self.have[rank])

        engine_rules = model.rules(case.interleaved, model.kv_heads, engine_blocks)
        self.target: dict[int, list[Piece]] = {}
        self.want: dict[int, Arrays] = {}
        for rank, place in engine_places.items():
            self.want[rank] = model.parameters(place, case.interleaved, True, engine_blocks)
            self.target[rank] = self._pieces(engine_rules, place, self.want[rank])

    def _pieces(self, rules: Mapping[str, Rule], place: Place, arrays: Arrays) -> list[Piece]:
        pieces: list[Piece] = []
        for name, array in arrays.items():
            part = place.etp if rules[name].of_expert else place.tp
            pieces += pieces_of(name, rules[name], self._shapes, part.number, part.of)
            assert local_shape(rules[name], self._shapes, part.of) == array.shape
        return pieces

    def sides(self) -> list[Sides]:
        """Sides that count the replicas of each shard, worked out by hand."""
        case = self.case
        actor = case.actor
        dense = _blocks_side(case, actor.tp, actor.cp * actor.dp, self.source, of_expert=False)
        edp = case.stage_ranks // case.expert_block
        experts = _blocks_side(case, case.expert_block, edp, self.source, of_expert=True)
        return [
            (dense, _engine_side(case, self.target, of_expert=False)),
            (experts, _engine_side(case, self.target, of_expert=True)),
        ]

    def lacking(self, rank: int) -> int:
        """How many numbers a rank needs and does not have."""
        needed = _numbers(self.want[rank]) - {-1}
        return len(needed - _numbers(self.have.get(rank, {})))


def _blocks_side(
    case: Case, block: int, replicas: int, pieces: Mapping[int, list[Piece]], of_expert: bool
) -> Side:
    """Training, where `block` ranks of a stage, one after another, hold a copy of it."""

    def place_of(rank: int) -> tuple[int, int] | None:
        others, in_block = divmod(rank, block)
        stage, replica = divmod(others, replicas)
        return (stage * block + in_block, replica) if stage < case.actor.pp else None

    def rank_at(shard: int, replica: int) -> int:
        stage, in_block = divmod(shard, block)
        return (stage * replicas + replica) * block + in_block

    return Side(
        shards=block * case.actor.pp,
        replicas=range(replicas),
        place_of=place_of,
        rank_at=rank_at,
        pieces=lambda shard: [p for p in pieces[rank_at(shard, 0)] if p.of_expert == of_expert],
    )


def _engine_side(case: Case, pieces: Mapping[int, list[Piece]], of_expert: bool) -> Side:
    first = case.first_engine_rank

    def place_of(rank: int) -> tuple[int, int] | None:
        replica, shard = divmod(rank - first, case.engine_tp)
        return (shard, replica) if 0 <= rank - first < case.engine_ranks else None

    return Side(
        shards=case.engine_tp,
        replicas=range(case.engine_ranks // case.engine_tp),
        place_of=place_of,
        rank_at=lambda shard, replica: first + replica * case.engine_tp + shard,
        pieces=lambda shard: [p for p in pieces[first + shard] if p.of_expert == of_expert],
    )


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


@settings(max_examples=150)
@given(cases())
def test_every_number_arrives_once_and_no_byte_is_wasted(case: Case) -> None:
    first = case.first_engine_rank
    places = {first + n: case.engine_place(n % case.engine_tp) for n in range(case.engine_ranks)}
    ranks = Ranks(case, places)
    everyone = sorted({*ranks.source, *ranks.target})
    _check(ranks, plan_all(Planner(ranks.sides(), 4, case.near), everyone))
    # The same ranks, described one by one.
    listed = [(side_of_ranks(ranks.source), side_of_ranks(ranks.target))]
    _check(ranks, plan_all(Planner(listed, 4, case.near), everyone))


@settings(max_examples=60)
@given(cases())
def test_replicas_get_all_experts_from_the_ranks_that_exchange(case: Case) -> None:
    """The engine lies on the actor's ranks; a rank plans from its own part of the job alone."""
    actor = case.actor
    if actor.world_size % case.engine_tp:
        case = replace(case, engine_tp=1, engine_ep=1, mlp_blocks=(case.mlp_blocks[0], 1))
    inside = actor.tp * actor.cp * actor.pp % case.engine_tp == 0
    layout = EngineLayout.closest if inside else EngineLayout.consecutive
    engines = layout(actor, case.engine_tp, case.engine_ep)
    places = {rank: case.engine_place(engines.place(rank)[1]) for rank in range(actor.world_size)}
    ranks = Ranks(case, places)

    def near(rank: int) -> list[int]:
        return [other for other in case.near(rank) if other < actor.world_size]

    plans = {}
    for rank in ranks.source:
        sides = sides_around(rank, engines, ranks.source.__getitem__, ranks.target.__getitem__)
        plans[rank] = Planner(sides, 4, near).plan(rank)
    check_agreement(plans)
    _check(ranks, WholePlan(plans))

    exchanges = {rank: group for group in engines.exchanges for rank in group}
    for move in WholePlan(plans).moves:
        assert exchanges[move.source_rank] is exchanges[move.target_rank]


def _check(ranks: Ranks, whole: WholePlan) -> None:
    """Carry out the plans of all ranks, and count what arrives."""
    received = Received(ranks.want)

    for rank, alias in whole.aliases:
        key = alias.pieces[0].key
        (name,) = {piece.parameter for piece in ranks.source[rank] if piece.key == key}
        wanted = ranks.want[rank][alias.parameter]
        received.numbers[rank][alias.parameter][...] = ranks.have[rank][name]
        received.times[rank][alias.parameter] += wanted >= 0

    for copy in whole.copies:
        received.write(copy, _sent(ranks.have, copy))

    received_elements = _carry(ranks, whole, received)
    for rank, arrays in ranks.want.items():
        for name, array in arrays.items():
            assert np.array_equal(received.numbers[rank][name], array), (rank, name)
            assert np.array_equal(received.times[rank][name], array >= 0), (rank, name)
        assert received_elements[rank] == ranks.lacking(rank)
        assert whole.minimum[rank] == 4 * ranks.lacking(rank)


def _carry(ranks: Ranks, whole: WholePlan, received: Received) -> dict[int, int]:
    """Make all moves; how many numbers each rank gets."""
    elements = dict.fromkeys(ranks.want, 0)
    for plan in whole.plans.values():
        for move in plan.sends:
            for part in split(move, ranks.case.capacity):
                _check_part(part, ranks.case.capacity)
                received.write(part, _sent(ranks.have, part))
                elements[part.target_rank] += part.elements
    return elements


def _check_part(part: Move, capacity: int) -> None:
    """It has no more numbers than asked for, or one row, and both sides can view it."""
    assert part.elements <= capacity or part.stop - part.start == 1
    for piece in (part.source, part.target):
        rows = _rows(piece, part.start, part.stop)
        is_whole_blocks = not any(
            (edge - piece.start) % piece.block for edge in (part.start, part.stop)
        )
        assert is_whole_blocks or rows[-1] - rows[0] == len(rows) - 1, part
