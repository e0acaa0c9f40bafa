"""Resharding over gloo into a fake engine: bit for bit, shared where layouts coincide, bounded, and verified."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import Peer, exchange
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import EngineLayout, ParallelLayout
from mrlhf.reshard.execute import Resharder, WeightHolder
from mrlhf.reshard.plan import plan
from mrlhf.weights.shard import Piece, Slot
from tests.ranks import run_ranks
from tests.shards import fill, full_tensors, make_slots, stored, tiny_spec

CASES = [
    (tp, pp, engine_tp)
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
    for engine_tp in (1, 2, 4)
    if tp * pp % engine_tp == 0
]
BUCKET_BYTES = 20_000
MODELS = ("llama", "qwen2_tied", "qwen3")


class FakeEngine:
    """Weights without inference: tensors of NaN until bound or filled."""

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
        return [Slot(piece, self.tensors[piece.parameter]) for pieces in self._pieces.values() for piece in pieces]


def _make(
    spec: ModelSpec, actor: ParallelLayout, engine_tp: int, rank: int, dtype: torch.dtype, **options: object
) -> tuple[Resharder, list[Slot], FakeEngine]:
    engine_layout, world = EngineLayout.inside(actor, engine_tp), range(actor.world_size)
    source = {r: role_pieces(spec, actor, r) for r in world}
    target = {r: engine_pieces(spec, engine_layout, r) for r in world}
    found = plan(source, target, dtype.itemsize, actor.groups("tp", "pp"))
    assert found.bytes_moved == found.bytes_minimum
    slots, engine = make_slots(source[rank], dtype), FakeEngine(target[rank], dtype)
    return Resharder(found, slots, engine, rank, BUCKET_BYTES, **options), slots, engine


def _assert_holds(engine: WeightHolder, full: dict[str, Tensor]) -> None:
    for slot in engine.weight_slots():
        piece = slot.piece
        assert torch.equal(stored(slot), full[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)), (
            piece
        )


def _all_layouts(rank: int) -> None:
    for model in MODELS:
        spec, dtype = tiny_spec(model), torch.bfloat16 if model == "qwen3" else torch.float32
        full = full_tensors(spec, dtype)
        longest_row = 37 * dtype.itemsize
        for number, (tp, pp, engine_tp) in enumerate(CASES):
            actor = ParallelLayout.for_world("actor", 4, tp, pp)
            resharder, slots, engine = _make(spec, actor, engine_tp, rank, dtype, verify=number % 2 == 0)
            for scale in (1.0, -2.0):  # the second run brings new weights into the same storage
                scaled = {name: tensor * scale for name, tensor in full.items()}
                fill(slots, scaled)
                stats = resharder.run()
                _assert_holds(engine, scaled)
                assert stats.bytes_moved == stats.bytes_had_to_move
                assert stats.peak_extra_bytes <= 2 * (BUCKET_BYTES + 3 * longest_row)
            if (tp, pp) == (engine_tp, 1):
                _assert_shared(slots, engine)
                assert stats.bytes_moved == stats.peak_extra_bytes == 0


def _assert_shared(slots: list[Slot], engine: FakeEngine) -> None:
    trained = {slot.piece.parameter: slot.parameter.data_ptr() for slot in slots}
    assert {name: tensor.data_ptr() for name, tensor in engine.tensors.items()} == trained


def _flip_one_byte(sends: Sequence[Peer], receives: Sequence[Peer], group: dist.ProcessGroup | None) -> None:
    """A link that damages the last byte of what rank 3 gets from rank 0."""
    exchange(sends, receives, group)
    for peer, tensor in receives:
        if dist.get_rank() == 3 and peer == 0:
            tensor.view(torch.uint8)[-1] ^= 1


def _damage_is_noticed(rank: int) -> None:
    spec, actor = tiny_spec("llama"), ParallelLayout(2, 2, 1)
    full = full_tensors(spec)
    for verify in (False, True):
        resharder, slots, engine = _make(spec, actor, 1, rank, torch.float32, verify=verify, transport=_flip_one_byte)
        fill(slots, full)
        if rank != 3:
            resharder.run()
            _assert_holds(engine, full)
        elif verify:
            with pytest.raises(WeightError, match=r"model\.\S+\[\d+:\d+\] of dimension \d from rank 0 to rank 3 and"):
                resharder.run()
        else:
            resharder.run()
            with pytest.raises(AssertionError):
                _assert_holds(engine, full)


def _one_group_alone(rank: int) -> None:
    """A plan of one model-parallel group, over that group, serves its ranks."""
    spec, actor = tiny_spec("qwen2_tied"), ParallelLayout(1, 2, 2)
    engine_layout = EngineLayout.inside(actor, 2)
    for ranks in actor.groups("tp", "pp"):
        group = dist.new_group(ranks)
        if rank in ranks:
            source = {r: role_pieces(spec, actor, r) for r in ranks}
            target = {r: engine_pieces(spec, engine_layout, r) for r in ranks}
            slots, engine = make_slots(source[rank]), FakeEngine(target[rank], torch.float32)
            fill(slots, full_tensors(spec))
            Resharder(plan(source, target, 4), slots, engine, rank, 10**6, verify=True, group=group).run()
            _assert_holds(engine, full_tensors(spec))


def _native_engine(rank: int) -> None:
    """The real engine has the pieces that the plan expects, and takes them in."""
    spec, actor = tiny_spec("qwen2_tied"), ParallelLayout(2, 2, 1)
    factory = GroupFactory(timeout_s=60.0)
    for tp in (1, 2, 4):
        layout = EngineLayout.inside(actor, tp)
        engine = NativeEngine(
            spec,
            factory.engine_groups(layout).tp,
            torch.device("cpu"),
            torch.float32,
            4,
            max_length=16,
            max_prefill_tokens=16,
        )
        source = {r: role_pieces(spec, actor, r) for r in range(4)}
        target = {r: engine_pieces(spec, layout, r) for r in range(4)}
        slots = make_slots(source[rank])
        fill(slots, full_tensors(spec))
        Resharder(plan(source, target, 4), slots, engine, rank, BUCKET_BYTES, verify=True).run()
        assert [piece for pieces in engine.parameter_pieces().values() for piece in pieces] == target[rank]
        _assert_holds(engine, full_tensors(spec))
        engine.commit(1)


def _body(rank: int, world_size: int) -> None:
    _all_layouts(rank)
    _one_group_alone(rank)
    _native_engine(rank)
    _damage_is_noticed(rank)


@pytest.mark.timeout(280)
def test_engine_weights_equal_the_training_weights() -> None:
    run_ranks(4, _body)
