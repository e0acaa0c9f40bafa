"""Plans of large jobs: each rank plans alone, ranks agree, and senders share the work."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest

from mrlhf.models import parameters
from mrlhf.models.families import family_of
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import AXES, ParallelLayout
from mrlhf.reshard.moves import Move
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import sides_around
from mrlhf.weights.shard import Rule, Shape
from tests.shards import tiny_spec

HUGE = ParallelLayout(tp=8, pp=8, dp=128, etp=8)
HUGE_MIXTURE = ParallelLayout(tp=8, pp=8, dp=128, ep=32)


def _spec(tied: bool = False) -> ModelSpec:
    return replace(
        tiny_spec("llama"), num_heads=32, num_kv_heads=16, head_dim=4, hidden_size=64, ffn_size=128,
        num_layers=8, vocab_size=200, tied_embeddings=tied,
    )  # fmt: skip


def _mixture() -> ModelSpec:
    """Four experts on each of 32 ranks, with the sizes of `_spec` otherwise."""
    dense = _spec()
    experts = tiny_spec("qwen3_moe").experts
    assert experts is not None
    return replace(
        dense,
        family="qwen3_moe",
        experts=replace(experts, count=128, ffn_size=16, layers=(True,) * dense.num_layers),
    )


def _planner(
    spec: ModelSpec, engines: EngineLayout, rank: int, machine: int | Sequence[int]
) -> Planner:
    """The planner of one rank, where `machine` ranks in a row are near each other.

    Machines of different sizes are given one by one.
    """
    sides = sides_around(
        rank,
        engines,
        partial(role_pieces, spec, engines.actor),
        partial(engine_pieces, spec, engines),
        partial(engine_pieces, spec, engines),
    )
    return Planner(sides, 2, lambda rank: _machine_of(rank, machine))


def _machine_of(rank: int, machine: int | Sequence[int]) -> range:
    if isinstance(machine, int):
        first = rank // machine * machine
        return range(first, first + machine)

    ends = list(accumulate(machine))
    number = bisect_right(ends, rank)
    return range(ends[number] - machine[number], ends[number])


def _between(moves: Sequence[Move], sender: int, receiver: int) -> list[Move]:
    return [m for m in moves if (m.source_rank, m.target_rank) == (sender, receiver)]


@pytest.mark.parametrize(
    ("engines", "exchanges"),
    [
        (EngineLayout.inside(HUGE, 8), None),
        (EngineLayout.inside(HUGE, 1), None),
        (EngineLayout.consecutive(HUGE, 16), None),
        (EngineLayout.consecutive(HUGE, 4), None),
        # Each 4 model-parallel groups hold the experts together.
        (EngineLayout.closest(HUGE_MIXTURE, 8, 8), 32),
        (EngineLayout.closest(HUGE_MIXTURE, 8, 1), 32),
        (EngineLayout.closest(HUGE_MIXTURE, 16, 4), 32),
    ],
)
def test_ranks_of_a_huge_job_agree_and_receive_the_minimum(
    engines: EngineLayout, exchanges: int | None
) -> None:
    """The slices of 8,192 ranks: who shall send to me plans to send to me, and the reverse."""
    spec = _spec() if exchanges is None else _mixture()
    assert exchanges in (None, len(engines.exchanges))
    for rank in (0, 4099, 8191):
        planner = _planner(spec, engines, rank, machine=8)
        plan = planner.plan(rank)
        assert plan.bytes_received == plan.bytes_minimum

        senders = sorted({move.source_rank for move in plan.receives})
        assert senders
        for sender in senders[:: len(senders) // 6 + 1]:
            other = _planner(spec, engines, sender, machine=8).plan(sender).sends
            assert _between(other, sender, rank) == _between(plan.receives, sender, rank)

        receivers = sorted({move.target_rank for move in plan.sends})
        assert receivers
        for receiver in receivers[:: len(receivers) // 6 + 1]:
            received = _planner(spec, engines, receiver, machine=8).plan(receiver).receives
            assert _between(received, rank, receiver) == _between(plan.sends, rank, receiver)


@pytest.mark.parametrize("tp", [8, 16])
def test_the_rules_looked_at_grow_with_the_tensors_and_not_with_shards(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine rank needs a part of every tensor; of the others' a rank lists what it holds."""
    looked_at = 0

    class Counted(dict[str, Rule]):
        """The rules of a chunk; counts those that are looked at one by one."""

        def __getitem__(self, name: str) -> Rule:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(name)

        def items(self) -> Any:
            for name in self:
                yield name, self[name]

        def values(self) -> Any:
            for name in self:
                yield self[name]

    class Map(parameters._WeightMap):
        def __init__(self, rules: Mapping[str, Rule], shapes: Mapping[str, Shape]) -> None:
            super().__init__(Counted(rules), shapes)

    # The maps of this spec are made anew, because no other test has such a vocabulary.
    spec = replace(_mixture(), vocab_size=1000 + tp)
    monkeypatch.setattr(parameters, "_WeightMap", Map)
    tensors = len(family_of(spec).tensor_shapes(spec))
    assert tensors > 3000
    engines = EngineLayout.closest(HUGE_MIXTURE, tp)
    assert _planner(spec, engines, 4099, machine=8).plan(4099).sends
    assert looked_at <= 6 * tensors


def test_a_holder_on_the_same_machine_sends() -> None:
    """Machines have two stages of one data-parallel copy, or both copies of one stage."""
    actor = ParallelLayout(tp=2, pp=4, dp=2)
    engines = EngineLayout.consecutive(actor, 4)
    for rank in range(16):
        planner = _planner(_spec(), engines, rank, machine=4)
        for move in planner.plan(rank).receives:
            stage = actor.coordinates(move.source_rank).pp
            is_stage_here = stage == actor.coordinates(rank).pp
            assert (move.source_rank in _machine_of(rank, 4)) == is_stage_here


UNEVEN = [(12, 12, 12, 12, 12, 4), (7,) * 9 + (1,)]


@pytest.mark.parametrize(
    ("actor", "engine_tp", "tied", "machine"),
    [
        (ParallelLayout(tp=4, pp=2, dp=8), 16, False, 1),
        (ParallelLayout(tp=4, pp=2, dp=8), 16, False, 8),
        (ParallelLayout(tp=2, pp=2, dp=16), 8, False, 1),
        (ParallelLayout(tp=2, pp=2, dp=16), 8, False, 8),
        (ParallelLayout(tp=4, pp=1, dp=16), 1, False, 8),
        (ParallelLayout(tp=1, pp=4, dp=6), 2, False, 8),
        (ParallelLayout(tp=2, pp=4, dp=8), 16, True, 1),
        (ParallelLayout(tp=4, pp=4, dp=4), 8, True, 8),
        (ParallelLayout(tp=4, pp=2, dp=8), 16, False, UNEVEN[0]),
        (ParallelLayout(tp=2, pp=2, dp=16), 8, False, UNEVEN[1]),
    ],
)
def test_no_rank_sends_much_more_than_the_mean(
    actor: ParallelLayout, engine_tp: int, tied: bool, machine: int | Sequence[int]
) -> None:
    """All plans move the minimum; with uneven machines a rank may send a few times the mean."""
    engines = EngineLayout(engine_tp, actor, AXES)
    planner = _planner(_spec(tied), engines, 0, machine)
    sent: list[int] = []
    received = 0
    for rank in range(actor.world_size):
        plan = planner.plan(rank)
        sent.append(2 * sum(move.elements for move in plan.sends))
        received += plan.bytes_received
        assert plan.bytes_received == plan.bytes_minimum

    assert sum(sent) == received > 0
    assert max(sent) * len(sent) / received <= (1.6 if isinstance(machine, int) else 3.2)
