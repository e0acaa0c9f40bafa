"""What plans share, who sends, and what they refuse, by hand; and the plans of large jobs, in which
each rank plans alone, ranks agree, and senders share the work.

`test_reshard_property` carries plans out between random layouts, `dist/test_reshard` over gloo.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch

from mrlhf.errors import WeightError
from mrlhf.models import parameters
from mrlhf.models.families import family_of
from mrlhf.models.parameters import engine_pieces, parameter_names, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import AXES, AxisSizes, ParallelLayout
from mrlhf.reshard.moves import Move
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import Sides, sides_around, sides_of_all
from mrlhf.weights.shard import Piece, Rule, Shape
from tests.plans import WholePlan, plan_all, side_of_ranks
from tests.shards import MODELS, tiny_spec

Pieces = Mapping[int, Sequence[Piece]]
HUGE = ParallelLayout(tp=8, pp=8, dp=128, etp=8)
HUGE_MIXTURE = ParallelLayout(tp=8, pp=8, dp=128, ep=32)
# Machines of different sizes.
UNEVEN = [(12, 12, 12, 12, 12, 4), (7,) * 9 + (1,)]


def _pieces(spec: ModelSpec, actor: ParallelLayout, engine: EngineLayout) -> tuple[Pieces, Pieces]:
    """The pieces of each rank on both sides."""
    world = range(actor.world_size)
    source = {rank: role_pieces(spec, actor, rank) for rank in world}
    target = {rank: engine_pieces(spec, engine, rank) for rank in world}
    return source, target


def _sides(spec: ModelSpec, engine: EngineLayout) -> list[Sides]:
    return sides_of_all(
        engine,
        lambda rank: role_pieces(spec, engine.actor, rank),
        lambda rank: engine_pieces(spec, engine, rank),
    )


def _plan_listed(source: Pieces, target: Pieces) -> WholePlan:
    """The plan of ranks that are described one by one."""
    planner = Planner([(side_of_ranks(source), side_of_ranks(target))], itemsize=4)
    return plan_all(planner, sorted({*source, *target}))


def test_coinciding_layouts_share_everything() -> None:
    actor = ParallelLayout.for_world("actor", 4, AxisSizes(tp=2, pp=1))
    for model in MODELS:
        spec = replace(tiny_spec(model), num_kv_heads=4)
        sides = _sides(spec, EngineLayout.inside(actor, 2))
        reshard_plan = plan_all(Planner(sides, 4), range(4))
        assert not reshard_plan.moves and not reshard_plan.copies
        assert reshard_plan.bytes_minimum == 0
        names = parameter_names(spec, actor, actor.coordinates(0))
        assert [alias.parameter for alias in reshard_plan.plans[3].aliases] == names


def test_where_ranks_share_kv_heads_only_the_rest_of_a_head_moves() -> None:
    """Two KV heads of 4 rows on four ranks: a rank has 2 rows of its head, of k and of v."""
    spec = tiny_spec("qwen2_tied")
    actor = ParallelLayout.for_world("actor", 4, AxisSizes(tp=4, pp=1))
    sides = _sides(spec, EngineLayout.inside(actor, 4))
    reshard_plan = plan_all(Planner(sides, 4), range(4))
    assert reshard_plan.minimum == dict.fromkeys(range(4), 4 * 2 * 2 * (32 + 1) * spec.num_layers)
    assert reshard_plan.bytes_moved == reshard_plan.bytes_minimum
    pairs = {(move.source_rank, move.target_rank) for move in reshard_plan.moves}
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}

    own = [alias.parameter for alias in reshard_plan.plans[3].aliases]
    names = [
        name
        for name in parameter_names(spec, actor, actor.coordinates(0))
        if "linear_qkv" not in name
    ]
    assert own == names


def test_a_fused_norm_is_shared_under_its_other_name() -> None:
    actor = ParallelLayout(tp=2, pp=1, dp=1)
    source, target = _pieces(tiny_spec("llama"), actor, EngineLayout.inside(actor, 2))
    fused = [
        p._replace(parameter=p.parameter.replace("pre_mlp_layernorm.", "mlp.linear_fc1.x_"))
        for p in source[0]
    ]
    assert fused != source[0]
    reshard_plan = _plan_listed({0: fused, 1: source[1]}, target)
    assert reshard_plan.bytes_moved == reshard_plan.bytes_local == 0


EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("model", "vpp", "rank", "shared", "others"),
    [
        # The last stage's copy of the tied embedding serves as the engine's embedding.
        ("qwen2_tied", 1, 2, ["decoder.layers.2.mlp.linear_fc1.weight", EMBEDDING], []),
        # Chunks have layers of the same local numbers, which are other layers of the model.
        ("llama", 2, 0, [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in (0, 2)], [1]),
    ],
)
def test_layers_are_shared_where_only_stages_or_chunks_differ(
    model: str, vpp: int, rank: int, shared: list[str], others: list[int]
) -> None:
    actor = ParallelLayout(tp=2, pp=2, vpp=vpp, dp=1)
    engine = EngineLayout.inside(actor, 2)
    reshard_plan = plan_all(Planner(_sides(tiny_spec(model), engine), 4), range(4))
    found = {alias.parameter for alias in reshard_plan.plans[rank].aliases}
    assert set(shared) <= found
    assert not {f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in others} & found
    assert reshard_plan.bytes_local == 0


def _sent(moves: Sequence[Move]) -> Counter[int]:
    sent: Counter[int] = Counter()
    for move in moves:
        sent[move.source_rank] += move.elements
    return sent


def test_replicas_share_the_work_and_near_ones_go_first() -> None:
    spec = tiny_spec("llama")
    full = role_pieces(spec, ParallelLayout(tp=1, pp=1, dp=1), 0)
    largest = max(torch.Size(piece.full_shape).numel() for piece in full)
    source = dict.fromkeys(range(4), full)
    target = dict.fromkeys(range(4, 8), full)
    sent = _sent(_plan_listed(source, target).moves)
    assert set(sent) == {0, 1, 2, 3} and max(sent.values()) - min(sent.values()) <= largest

    machines = {rank: ranks for ranks in ([0, 1, 4, 5], [2, 3, 6], [7]) for rank in ranks}
    sides = (side_of_ranks(source), side_of_ranks(target))
    near = plan_all(Planner([sides], 4, machines.__getitem__), range(8))
    pairs = {(move.source_rank, move.target_rank) for move in near.moves}
    expected = {(0, 4), (0, 5), (1, 4), (1, 5), (2, 6), (3, 6)}
    assert {pair for pair in pairs if pair[1] != 7} == expected
    assert any(target_rank == 7 for _, target_rank in pairs)


def test_what_nobody_holds_is_refused() -> None:
    actor = ParallelLayout(tp=2, pp=2, dp=1)
    source, target = _pieces(tiny_spec("llama"), actor, EngineLayout.inside(actor, 1))
    cut = {rank: pieces for rank, pieces in source.items() if rank != 3}
    with pytest.raises(
        WeightError, match=re.escape("no rank holds model.layers.2.self_attn.o_proj.weight[16:32]")
    ):
        _plan_listed(cut, target)


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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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
