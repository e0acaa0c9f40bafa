"""The invariants of reshard plans, checked by carrying plans out in one process.

The tensors are numbered: all numbers of all tensors differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from mrlhf.errors import WeightError
from mrlhf.models.parameters import engine_pieces, parameter_names, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.moves import Move, split
from mrlhf.reshard.plan import Planner, ReshardPlan
from mrlhf.reshard.sides import Sides, sides_around, sides_of_all
from mrlhf.weights.shard import Piece, Rule, Slot, pieces_of
from tests.plans import WholePlan, plan_all, side_of_ranks
from tests.shards import MODELS, fill, make_slots, stored, tiny_spec

Pieces = Mapping[int, Sequence[Piece]]
Slots = dict[int, list[Slot]]
SMALL = [
    (ParallelLayout.for_world("actor", 4, sizes), engine_tp)
    for sizes in (
        *(AxisSizes(tp=tp, pp=pp) for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))),
        AxisSizes(tp=2, pp=2, vpp=2),
        AxisSizes(pp=2, vpp=2, pp_layers=(0, 2, 1, 1)),
        AxisSizes(pp=4, pp_layers=(1, 2, 1, 0)),
    )
    for engine_tp in (1, 2, 4)
    if sizes.ranks % engine_tp == 0
]
FUSED = [
    (periods, sizes)
    for periods in ((6, 4), (12, None), (None, 6), (4, 12), (2, 4))
    for sizes in ((2, 4), (4, 2), (1, 2), (2, 1), (4, 4))
    if all(count is None or count % tp == 0 for count, tp in zip(periods, sizes, strict=True))
]


def _wide(model: str) -> ModelSpec:
    """Enough heads, rows and layers for tensor-parallel size 16 and four stages."""
    return replace(
        tiny_spec(model), num_heads=32, num_kv_heads=16, head_dim=2, ffn_size=32, num_layers=4
    )


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


def _sides_around(spec: ModelSpec, engine: EngineLayout, rank: int) -> list[Sides]:
    return sides_around(
        rank,
        engine,
        lambda rank: role_pieces(spec, engine.actor, rank),
        lambda rank: engine_pieces(spec, engine, rank),
    )


def _plan_listed(source: Pieces, target: Pieces) -> WholePlan:
    """The plan of ranks that are described one by one."""
    planner = Planner([(side_of_ranks(source), side_of_ranks(target))], itemsize=4)
    return plan_all(planner, sorted({*source, *target}))


def _machines(*machines: Sequence[int]) -> Callable[[int], Sequence[int]]:
    machine_of = {rank: ranks for ranks in machines for rank in ranks}
    return lambda rank: machine_of[rank]


def _numbered(pieces: Pieces) -> dict[str, torch.Tensor]:
    """Full tensors in which all numbers differ."""
    shapes = {piece.name: piece.full_shape for held in pieces.values() for piece in held}
    tensors: dict[str, torch.Tensor] = {}
    first = 0
    for name, shape in sorted(shapes.items()):
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + size, dtype=torch.float64).view(shape)
        first += size
    return tensors


def _slot(slots: Slots, rank: int, piece: Piece) -> Slot:
    """The slot in which `rank` stores `piece`."""
    (slot,) = [slot for slot in slots[rank] if slot.piece.key == piece.key]
    return slot


def _check_carried_out(reshard_plan: WholePlan, source: Pieces, target: Pieces) -> None:
    """Carry the plan out; each target number must be right, and written or aliased once."""
    full = _numbered(source)
    source_slots = {rank: make_slots(pieces, torch.float64) for rank, pieces in source.items()}
    target_slots = {rank: make_slots(pieces, torch.float64) for rank, pieces in target.items()}
    for slots in source_slots.values():
        fill(slots, full)

    for rank, alias in reshard_plan.aliases:
        for piece in alias.pieces:
            assert piece.parameter == alias.parameter
            trained = _slot(source_slots, rank, piece)
            _slot(target_slots, rank, piece).parameter.copy_(trained.parameter)

    for move in (*reshard_plan.copies, *reshard_plan.moves):
        received = _slot(target_slots, move.target_rank, move.target).view(move.start, move.stop)
        assert received.isnan().all(), f"{move} arrives twice"
        sent = _slot(source_slots, move.source_rank, move.source).view(move.start, move.stop)
        received.copy_(sent.reshape(received.shape))

    for rank, slots in target_slots.items():
        for slot in slots:
            piece = slot.piece
            expected = full[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
            assert torch.equal(stored(slot), expected), (rank, piece)


def _numbers(pieces: Sequence[Piece], full: Mapping[str, torch.Tensor]) -> set[float]:
    numbers: set[float] = set()
    for piece in pieces:
        held = full[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
        numbers.update(held.flatten().tolist())
    return numbers


def _check_bytes(
    reshard_plan: WholePlan, source: Pieces, target: Pieces, itemsize: int = 4
) -> None:
    """Compare the bytes of each rank with sets of numbers."""
    full = _numbered(source)
    for rank, pieces in target.items():
        needed = _numbers(pieces, full)
        held = _numbers(source.get(rank, ()), full)
        assert reshard_plan.minimum[rank] == itemsize * len(needed - held)
    assert reshard_plan.bytes_moved == reshard_plan.bytes_minimum

    total = itemsize * sum(len(_numbers(pieces, full)) for pieces in target.values())
    aliased = itemsize * sum(len(_numbers(alias.pieces, full)) for _, alias in reshard_plan.aliases)
    assert reshard_plan.bytes_moved + reshard_plan.bytes_local + aliased == total


@pytest.mark.parametrize("model", ["llama", "qwen2_tied", "qwen3"])
@pytest.mark.parametrize(("actor", "tp"), SMALL, ids=str)
def test_every_number_arrives_once_and_none_needlessly(
    model: str, actor: ParallelLayout, tp: int
) -> None:
    spec = tiny_spec(model)
    engine = EngineLayout.inside(actor, tp)
    near = _machines(*actor.groups("tp", "pp"))
    reshard_plan = plan_all(Planner(_sides(spec, engine), 4, near), range(4))

    source, target = _pieces(spec, actor, engine)
    _check_carried_out(reshard_plan, source, target)
    _check_bytes(reshard_plan, source, target)
    assert reshard_plan == plan_all(Planner(_sides(spec, engine), 4, near), range(4))


@pytest.mark.parametrize(
    ("model", "tp", "pp", "engine_tp"),
    [
        ("llama", 4, 4, 16),
        ("qwen2_tied", 4, 4, 8),
        ("qwen3", 8, 2, 4),
        ("qwen2_tied", 2, 4, 2),
        ("llama", 1, 4, 1),
        ("llama", 32, 1, 16),
        ("qwen2_tied", 32, 1, 32),
    ],
)
def test_64_ranks(model: str, tp: int, pp: int, engine_tp: int) -> None:
    actor = ParallelLayout.for_world("actor", 64, AxisSizes(tp=tp, pp=pp))
    groups = actor.groups("tp", "pp")
    engine = EngineLayout.inside(actor, engine_tp)
    spec = _wide(model)
    source, target = _pieces(spec, actor, engine)
    near = _machines(*groups)
    reshard_plan = plan_all(Planner(_sides(spec, engine), 2, near), range(64))
    _check_bytes(reshard_plan, source, target, itemsize=2)
    _check_carried_out(reshard_plan, source, target)

    group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    for move in reshard_plan.moves:
        assert group_of[move.source_rank] == group_of[move.target_rank]

    # Each group can plan alone.
    alone: dict[int, ReshardPlan] = {}
    for ranks in groups:
        alone |= plan_all(Planner(_sides_around(spec, engine, ranks[0]), 2), ranks).plans
    reshard_plan = WholePlan(alone)
    _check_bytes(reshard_plan, source, target, itemsize=2)
    for move in reshard_plan.moves:
        assert group_of[move.source_rank] == group_of[move.target_rank]


def test_coinciding_layouts_share_everything() -> None:
    for model in MODELS:
        actor = ParallelLayout.for_world("actor", 4, AxisSizes(tp=2, pp=1))
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


@pytest.mark.parametrize(("periods", "sizes"), FUSED)
def test_blocks_of_any_size_are_cut_where_both_sides_can_view_them(
    periods: tuple[int | None, int | None], sizes: tuple[int, int]
) -> None:
    shapes = {"a": (24, 2), "b": (48, 2)}
    sides = []
    for count, tp in zip(periods, sizes, strict=True):
        rule = Rule(("a", "b"), 0, count)
        sides.append({rank: pieces_of("fused", rule, shapes, rank, tp) for rank in range(tp)})
    source, target = sides

    reshard_plan = _plan_listed(source, target)
    _check_carried_out(reshard_plan, source, target)
    _check_bytes(reshard_plan, source, target)

    for move in (*reshard_plan.moves, *reshard_plan.copies):
        for elements in (1, 2, 7, 10**6):
            parts = split(move, elements)
            stops = [part.stop for part in parts]
            assert [part.start for part in parts] == [move.start, *stops[:-1]]
            assert stops[-1] == move.stop
            assert all(part.elements <= max(2, elements) for part in parts)
            for part in parts:
                for piece in (part.source, part.target):
                    make_slots([piece])[0].view(part.start, part.stop)


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

    machines = _machines([0, 1, 4, 5], [2, 3, 6], [7])
    sides = (side_of_ranks(source), side_of_ranks(target))
    near = plan_all(Planner([sides], 4, machines), range(8))
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
