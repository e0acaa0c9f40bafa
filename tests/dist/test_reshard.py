"""Resharding over gloo into fake and real engines: exact, bounded in memory, and verified.

Engines share the storage of training weights where the layouts coincide.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.inference.native.parameters import Parameters
from mrlhf.models.parameters import (
    carried_pieces,
    engine_pieces,
    keeps_float32,
    role_pieces,
)
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout, ReplicaPlace
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.execute import Resharder, TransferOptions, WeightHolder
from mrlhf.reshard.links import LinkBuckets
from mrlhf.reshard.moves import Move
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import sides_around, sides_of_all
from mrlhf.reshard.views import Views
from mrlhf.weights.shard import Piece, Slot
from tests.ranks import run_ranks
from tests.shards import MIXTURES, fill, full_tensors, make_slots, stored, tiny_spec

# Virtual stages and uneven ones too; the models have four layers.
CASES = [
    (sizes, engine_tp)
    for sizes in (
        *(AxisSizes(tp=tp, pp=pp) for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))),
        AxisSizes(tp=2, pp=2, vpp=2),
        AxisSizes(pp=2, vpp=2, pp_layers=(0, 2, 1, 1)),
        AxisSizes(pp=4, pp_layers=(1, 2, 1, 0)),
    )
    for engine_tp in (1, 2, 4)
    if sizes.ranks % engine_tp == 0
]
# tp, pp, ep and etp of four ranks, then tp and ep of the engine: experts in one model-parallel
# group or across several, whole or split, and replicas inside a group or across groups.
EXPERT_LAYOUTS = [
    ((2, 1, 1, 2), (2, 1)),
    ((2, 1, 2, 1), (2, 2)),
    ((2, 1, 4, 1), (2, 2)),
    ((2, 1, 4, 1), (1, 1)),
    ((2, 1, 2, 2), (2, 1)),
    ((2, 2, 2, 1), (4, 4)),
    ((2, 2, 2, 1), (4, 2)),
    ((1, 2, 2, 1), (2, 1)),
    ((1, 1, 4, 1), (1, 1)),
    ((1, 1, 4, 1), (4, 4)),
    ((1, 1, 4, 1), (4, 1)),
    ((1, 2, 2, 1), (4, 2)),
]
BUCKET_BYTES = 20_000
OPTIONS = TransferOptions(BUCKET_BYTES)
MODELS = ("llama", "qwen2_tied", "qwen3", "phi3", "olmo2", "gemma4_text_linked")


class FakeEngine:
    """An engine that only holds weights; its tensors are NaN until they are bound or filled."""

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype) -> None:
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        for piece in pieces:
            self._pieces[piece.parameter] = (*self._pieces.get(piece.parameter, ()), piece)
        self._dtype = dtype
        self.tensors: dict[str, Tensor] = {}

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        return self._pieces

    def bind(self, parameter: str, tensor: Tensor) -> None:
        self.tensors[parameter] = tensor

    def weight_slots(self) -> list[Slot]:
        for parameter, pieces in self._pieces.items():
            if parameter not in self.tensors:
                self.tensors[parameter] = make_slots(pieces, self._dtype)[0].parameter

        slots: list[Slot] = []
        for parameter, pieces in self._pieces.items():
            slots += [Slot(piece, self.tensors[parameter]) for piece in pieces]
        return slots


def _planner(spec: ModelSpec, actor: ParallelLayout, engine_tp: int, itemsize: int) -> Planner:
    engines = EngineLayout.inside(actor, engine_tp)
    sides = sides_of_all(
        engines,
        lambda rank: role_pieces(spec, actor, rank),
        lambda rank: engine_pieces(spec, engines, rank),
    )
    groups = {rank: ranks for ranks in actor.groups("tp", "pp") for rank in ranks}
    return Planner(sides, itemsize, groups.__getitem__)


def _make(
    spec: ModelSpec,
    actor: ParallelLayout,
    engine_tp: int,
    rank: int,
    dtype: torch.dtype,
    options: TransferOptions = OPTIONS,
    group: dist.ProcessGroup | None = None,
) -> tuple[Resharder, list[Slot], FakeEngine]:
    planner = _planner(spec, actor, engine_tp, dtype.itemsize)
    slots = make_slots(role_pieces(spec, actor, rank), dtype)
    engine = FakeEngine(engine_pieces(spec, EngineLayout.inside(actor, engine_tp), rank), dtype)
    resharder = Resharder(planner, slots, engine, rank, options, group)
    return resharder, slots, engine


def _assert_holds(engine: WeightHolder, full: dict[str, Tensor]) -> None:
    for slot in engine.weight_slots():
        piece = slot.piece
        expected = full[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
        assert torch.equal(stored(slot), expected), piece


def _all_layouts(rank: int) -> None:
    for model in MODELS:
        spec = tiny_spec(model)
        dtype = torch.bfloat16 if model == "qwen3" else torch.float32
        full = full_tensors(spec, dtype)
        for number, (sizes, engine_tp) in enumerate(CASES):
            if sizes.pp_layers is not None and model not in ("llama", "qwen2_tied"):
                continue
            actor = ParallelLayout.for_world("actor", 4, sizes)
            options = replace(OPTIONS, verify=number % 3 == 0)
            resharder, slots, engine = _make(spec, actor, engine_tp, rank, dtype, options)

            # The second run brings new weights into the same storage.
            for scale in (1.0, -2.0):
                scaled = {name: tensor * scale for name, tensor in full.items()}
                fill(slots, scaled)
                calls: list[str] = []
                stats = resharder.run(meanwhile=lambda calls=calls: calls.append("called"))
                _assert_holds(engine, scaled)
                assert calls == ["called"]
                assert stats.bytes_moved == stats.bytes_had_to_move
                assert stats.peak_extra_bytes <= BUCKET_BYTES

            # Ranks that share a KV head hold parts of it in training, and the whole in an engine.
            fewest = min(kind.num_kv_heads for kind in spec.head_kinds)
            if (sizes.tp, sizes.pp) == (engine_tp, 1) and engine_tp <= fewest:
                _assert_shared(slots, engine)
                assert stats.bytes_moved == stats.peak_extra_bytes == 0


def _storage_may_change(rank: int) -> None:
    """Weights that have moved between two runs, on either side, are found; old ones are freed."""
    spec = tiny_spec("llama")
    actor = ParallelLayout(tp=2, pp=2, dp=1)
    resharder, slots, engine = _make(spec, actor, 1, rank, torch.float32)
    fill(slots, full_tensors(spec))
    resharder.run()

    old = [weakref.ref(tensor) for tensor in engine.tensors.values()]
    engine.tensors.clear()
    assert all(reference() is None for reference in old)

    for slot in slots:
        slot.parameter.set_(torch.full_like(slot.parameter, float("nan")))
    changed = {name: tensor + 1 for name, tensor in full_tensors(spec).items()}
    fill(slots, changed)
    resharder.run()
    _assert_holds(engine, changed)


def _a_rank_that_does_not_come_ends_the_wait(rank: int) -> None:
    spec = tiny_spec("llama")
    actor = ParallelLayout(tp=2, pp=2, dp=1)
    group = dist.new_group(timeout=timedelta(seconds=2))
    resharder, slots, _ = _make(spec, actor, 1, rank, torch.float32, group=group)
    fill(slots, full_tensors(spec))
    if rank != 2:
        with pytest.raises(RuntimeError):
            resharder.run()
        with pytest.raises(WeightError, match="failed half-way"):
            resharder.run()
    dist.barrier()


def _assert_shared(slots: list[Slot], engine: FakeEngine) -> None:
    trained = {slot.piece.parameter: slot.parameter.data_ptr() for slot in slots}
    assert {name: tensor.data_ptr() for name, tensor in engine.tensors.items()} == trained


class DamagingLinks:
    """Damages the last byte of the first slice that rank 3 gets from rank 0."""

    def __init__(self, links: LinkBuckets, received: Sequence[Move], rank: int) -> None:
        self._links = links
        self.peak_bytes = links.peak_bytes
        self._damaged: Move | None = None
        if rank == 3:
            self._damaged = next(move for move in received if move.source_rank == 0)

    def carry(self, source: Views, target: Views, work: Callable[[], None]) -> int:
        moved = self._links.carry(source, target, work)
        if self._damaged is not None:
            view = target(self._damaged.target, self._damaged.start, self._damaged.stop)
            view.view(torch.uint8)[..., -1] ^= 1
        return moved


def _damage_is_noticed(rank: int) -> None:
    spec = tiny_spec("llama")
    actor = ParallelLayout(tp=2, pp=2, dp=1)
    full = full_tensors(spec)
    received = _planner(spec, actor, 1, 4).plan(rank).receives
    for verify in (False, True):
        options = replace(OPTIONS, verify=verify)
        resharder, slots, engine = _make(spec, actor, 1, rank, torch.float32, options)
        assert resharder.links is not None
        resharder.links = DamagingLinks(resharder.links, received, rank)  # type: ignore[assignment]
        fill(slots, full)

        if rank != 3:
            resharder.run()
            _assert_holds(engine, full)
        elif verify:
            with pytest.raises(
                WeightError,
                match=r"bytes of model\.\S+\[\d+:\d+\] of dimension \d from rank 0 to rank 3;",
            ):
                resharder.run()
        else:
            resharder.run()
            with pytest.raises(AssertionError):
                _assert_holds(engine, full)


def _one_group_alone(rank: int) -> None:
    """A plan of one model-parallel group, carried out over that group, is enough for its ranks."""
    spec = tiny_spec("qwen2_tied")
    actor = ParallelLayout(tp=1, pp=2, dp=2)
    engine_layout = EngineLayout.inside(actor, 2)
    for ranks in actor.groups("tp", "pp"):
        group = dist.new_group(ranks)
        if rank in ranks:
            slots = make_slots(role_pieces(spec, actor, rank))
            engine = FakeEngine(engine_pieces(spec, engine_layout, rank), torch.float32)
            fill(slots, full_tensors(spec))

            sides = sides_around(
                rank,
                engine_layout,
                lambda rank: role_pieces(spec, actor, rank),
                lambda rank: engine_pieces(spec, engine_layout, rank),
            )
            options = TransferOptions(bucket_bytes=10**6, verify=True)
            Resharder(Planner(sides, 4), slots, engine, rank, options, group).run()
            _assert_holds(engine, full_tensors(spec))


class NativeWeights:
    """The weights of the real engine."""

    def __init__(
        self, spec: ModelSpec, place: ReplicaPlace, dtype: torch.dtype = torch.float32
    ) -> None:
        self.parameters = Parameters(spec, place, torch.device("cpu"), dtype)
        self.bind = self.parameters.bind
        self.weight_slots = self.parameters.slots

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        return self.parameters.pieces


def _native_engine(rank: int) -> None:
    """The real engine has the pieces that the plan expects, and is filled; padding rows are 0."""
    for kv_heads in (4, 2, 1):
        spec = replace(tiny_spec("qwen2_tied"), num_kv_heads=kv_heads)
        actor_tp = 4 if kv_heads == 2 else 2
        actor = ParallelLayout.for_world("actor", 4, AxisSizes(tp=actor_tp, pp=4 // actor_tp))
        for tp in (1, 2, 4):
            engine = NativeWeights(spec, ReplicaPlace(rank % tp, tp))
            slots = make_slots(role_pieces(spec, actor, rank))
            fill(slots, full_tensors(spec))
            planner = _planner(spec, actor, tp, 4)
            Resharder(planner, slots, engine, rank, replace(OPTIONS, verify=True)).run()

            held = [piece for pieces in engine.parameter_pieces().values() for piece in pieces]
            assert held == engine_pieces(spec, EngineLayout.inside(actor, tp), rank)
            _assert_holds(engine, full_tensors(spec))

            rows = engine.parameters["embedding.word_embeddings.weight"]
            assert rows.shape[0] == -(-37 // tp)
            if tp == 4 and actor_tp != tp:  # a shared parameter has the padding of the test
                assert (rows[-3:].eq(0).all().item()) == (rank == 3)

            if (tp, kv_heads) == (4, 2):
                qkv = engine.parameters["decoder.layers.1.self_attention.linear_qkv.weight"]
                expected = _two_kv_heads_on_four_ranks(
                    full_tensors(spec), "model.layers.1.self_attn", rank
                )
                assert torch.equal(qkv, expected)


def _two_kv_heads_on_four_ranks(full: dict[str, Tensor], prefix: str, rank: int) -> Tensor:
    """The qkv rows of one rank for 8 query heads and 2 KV heads, 4 rows each.

    Each rank has two query heads; ranks 0 and 1 hold KV head 0, ranks 2 and 3 KV head 1.
    """
    q, k, v = (full[f"{prefix}.{name}_proj.weight"] for name in "qkv")
    query_rows = slice(8 * rank, 8 * rank + 8)
    head = rank // 2
    kv_rows = slice(4 * head, 4 * head + 4)
    return torch.cat([q[query_rows], k[kv_rows], v[kv_rows]])


def _mixtures_of_experts(rank: int) -> None:
    """Experts reach every replica over the ranks that exchange, in the layouts that have them."""
    for name in MIXTURES:
        spec = tiny_spec(name)
        for number, ((tp, pp, ep, etp), (engine_tp, engine_ep)) in enumerate(EXPERT_LAYOUTS):
            sizes = AxisSizes(tp=tp, pp=pp, ep=ep, etp=etp)
            actor = ParallelLayout.for_world("actor", 4, sizes)
            engines = EngineLayout.closest(actor, engine_tp, engine_ep)
            dtype = torch.bfloat16 if number % 2 else torch.float32
            _hand_over(spec, engines, rank, dtype)


def _hand_over(
    spec: ModelSpec,
    engines: EngineLayout,
    rank: int,
    dtype: torch.dtype,
) -> None:
    actor = engines.actor
    slots = _role_slots(role_pieces(spec, actor, rank), dtype)
    engine = NativeWeights(spec, engines.place_in_replica(rank), dtype)
    sides = sides_around(
        rank,
        engines,
        lambda rank: carried_pieces(role_pieces(spec, actor, rank), dtype.itemsize),
        lambda rank: carried_pieces(engine_pieces(spec, engines, rank), dtype.itemsize),
    )
    groups = [dist.new_group(ranks) for ranks in engines.exchanges]
    (group,) = (g for g, ranks in zip(groups, engines.exchanges, strict=True) if rank in ranks)
    options = replace(OPTIONS, verify=True)
    resharder = Resharder(Planner(sides, dtype.itemsize), slots, engine, rank, options, group)

    for scale in (1.0, -2.0):
        full = {name: tensor * scale for name, tensor in full_tensors(spec).items()}
        for name, tensor in full.items():
            full[name] = tensor if name.endswith("correction_bias") else tensor.to(dtype)
        fill(slots, full)
        stats = resharder.run()
        assert stats.bytes_moved == stats.bytes_had_to_move
        _assert_holds(engine, full)

    same_experts = (actor.etp, actor.ep, actor.pp) == (engines.tp // engines.ep, engines.ep, 1)
    trained = {slot.parameter.data_ptr() for slot in slots if slot.piece.of_expert}
    held = {slot.parameter.data_ptr() for slot in engine.weight_slots() if slot.piece.of_expert}
    assert not same_experts or trained == held


def _role_slots(pieces: Sequence[Piece], dtype: torch.dtype) -> list[Slot]:
    """Where a role stores its pieces; corrections stay float32."""
    slots: list[Slot] = []
    for kept in (True, False):
        own = [piece for piece in pieces if keeps_float32(piece.parameter) == kept]
        slots += make_slots(own, torch.float32 if kept else dtype)
    return slots[::-1]


def _body(rank: int, world_size: int) -> None:
    _all_layouts(rank)
    _mixtures_of_experts(rank)
    _one_group_alone(rank)
    _native_engine(rank)
    _damage_is_noticed(rank)
    _storage_may_change(rank)
    _a_rank_that_does_not_come_ends_the_wait(rank)


def test_engine_weights_equal_the_training_weights() -> None:
    run_ranks(4, _body)
