"""A policy with adapters in the inference engine: apart, or merged into the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.models.lora import is_adapter, without_adapters
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.model_bytes import merged_bytes
from mrlhf.reshard.execute import ReshardStats, TransferOptions
from mrlhf.roles.actor import Actor
from mrlhf.rollout.generator import Generator
from mrlhf.trainers.ppo.generator_setup import plan_hand_over
from mrlhf.training.merging import MergedWeights, merged_slots
from mrlhf.weights.shard import Piece
from tests.dist.ppo_runs import (
    TP2_PP2,
    Scenario,
    assert_engine_and_trainer_agree,
    run_scenarios,
)
from tests.dist.role_runs import (
    MANY_PACKS,
    Setting,
    build_actor,
    cut_responses,
    load_experience,
    save_inputs,
    update_actor,
)
from tests.models.mixtures import as_in_files
from tests.oracle import plain_models, plain_ppo, plain_tables
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

# Fused layers, one tensor for q, k and v, more ranks than KV heads, experts whole and split.
MERGED = {
    "llama-biases": [AxisSizes(tp=2, pp=2), AxisSizes(tp=4)],
    "phi3": [AxisSizes(tp=2)],
    "qwen3-moe": [AxisSizes(tp=2, ep=2, etp=2)],
    "qwen2-moe": [AxisSizes(tp=2, ep=4, etp=1)],
    "gpt-oss": [AxisSizes(tp=2, ep=2, etp=2)],
}
# The model, its layout in training, then tp and ep of the engine.
APART = [
    ("llama-biases", AxisSizes(), 1, 1),
    ("llama-biases", AxisSizes(tp=2, pp=2), 1, 1),
    ("phi3", AxisSizes(tp=2), 1, 1),
    ("qwen3", AxisSizes(tp=4), 4, 1),
    ("qwen3-moe", AxisSizes(tp=2, ep=2, etp=1), 2, 2),
    ("qwen2-moe", AxisSizes(tp=2, ep=2, etp=2), 2, 1),
    ("gpt-oss", AxisSizes(tp=2, ep=2, etp=1), 2, 2),
    ("gpt-oss", AxisSizes(tp=2, ep=2, etp=2), 2, 1),
]
SAMPLING = SamplingParams(temperature=plain_tables.TEMPERATURE, n=2, max_tokens=6, seed=0)
LIMITS = EngineLimits(max_num_seqs=8, max_length=32, max_prefill_tokens=16, cache_bytes=2**22)


def _merged_tensors(model: Path) -> dict[str, Tensor]:
    """The base with its adapter merged, as the formula says."""
    adapted = plain_models.load(model, adapted=True)
    weights = {name: tensor.detach() for name, tensor in adapted.named_parameters()}
    for name, module in adapted.named_modules():
        if torch.nn.utils.parametrize.is_parametrized(module):
            for own in module.parametrizations:
                weights[f"{name}.{own}"] = getattr(module, own).detach()
    return as_in_files(
        {name: weight for name, weight in weights.items() if "parametrizations" not in name},
        adapted.config.model_type,
    )


def _merge(rank: int, world_size: int, root: Path) -> None:
    factory = GroupFactory(timeout_s=600.0)
    for model, layouts in MERGED.items():
        wanted = _merged_tensors(root / model)
        for sizes in layouts:
            for slot in merged_slots(_actor(factory, root, model, sizes).engine):
                piece = slot.piece
                whole = wanted[piece.name]
                expected = whole.narrow(piece.dim, piece.start, piece.stop - piece.start)
                torch.testing.assert_close(slot.load(), expected, rtol=1e-6, atol=1e-6)


def _actor(
    factory: GroupFactory, root: Path, model: str, sizes: AxisSizes, dtype: str = "float32"
) -> Actor:
    groups = factory.role_groups(ParallelLayout.for_world("actor", dist.get_world_size(), sizes))
    form = replace(MANY_PACKS, dtype=dtype, sequence_parallel=sizes.tp > 1)
    return build_actor(Setting(root, groups, form), Case(model, "token-mean", lora=True))


@dataclass(frozen=True)
class Sides:
    """A policy, and a generator with an engine that takes its weights."""

    actor: Actor
    generator: Generator
    engine: NativeEngine

    @classmethod
    def build(
        cls, factory: GroupFactory, actor: Actor, tp: int, ep: int = 1, merges: bool = False
    ) -> Sides:
        model = actor.engine
        engines = EngineLayout.closest(model.groups.layout, tp, ep)
        groups = factory.engine_groups(engines)
        merged = MergedWeights(model) if merges else None

        if merged is not None:
            foreseen = merged_bytes(model.spec, model.groups.layout, model.dtype.itemsize)
            most = torch.tensor(merged.nbytes)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            assert int(most) == foreseen

        spec = without_adapters(model.spec) if merges else model.spec
        engine = NativeEngine(spec, groups.tp, model.device, model.dtype, LIMITS, ep=ep)
        hand_over = plan_hand_over(
            model,
            engine,
            groups,
            lambda rank, tensors: engine_pieces(spec, engines, rank, tensors),
            TransferOptions(bucket_bytes=20_000, verify=True),
            merged,
        )

        return cls(actor, Generator(engine, groups, hand_over, seed=3), engine)

    def bytes_of_adapters(self) -> int:
        """Bytes of adapters that ranks of the engine need and do not hold, number by number."""
        model = self.actor.engine
        layout = model.groups.layout
        engines = self.generator.groups.layout
        lacking = 0
        for rank in range(layout.world_size):
            held = _numbers(role_pieces(model.spec, layout, rank))
            lacking += len(_numbers(engine_pieces(model.spec, engines, rank)) - held)
        return lacking * model.dtype.itemsize

    def difference(self, rollout: Rollout) -> float:
        """The largest difference between a log-prob of the engine and the policy's."""
        logprobs = self.actor.evaluate(rollout, cut_responses(self.actor, rollout)).logprobs
        return float((logprobs - rollout.rollout_logprobs)[rollout.loss_mask].abs().max())


def _numbers(pieces: Sequence[Piece]) -> set[tuple[str, int, int]]:
    """Each number of the adapters among the pieces."""
    numbers = set()
    for piece in pieces:
        if is_adapter(piece.name):
            across = piece.full_shape[1 - piece.dim]
            rows = range(piece.start, piece.stop)
            for row, column in product(rows, range(across)):
                place = (row, column) if piece.dim == 0 else (column, row)
                numbers.add((piece.name, *place))
    return numbers


def _apart(rank: int, world_size: int, root: Path) -> None:
    factory = GroupFactory(timeout_s=600.0)
    for model, sizes, tp, ep in APART:
        sides = Sides.build(factory, _actor(factory, root, model, sizes), tp, ep)
        rollout, stats, storage = _generate(sides, root, version=1)
        assert sides.difference(rollout) < 2e-5, (model, sizes)
        assert stats.bytes_moved == stats.bytes_had_to_move
        of_all = stats.bytes_moved

        update_actor(
            sides.actor, load_experience(root, Case(model, "token-mean")), plain_ppo.MINI_BATCH
        )
        rollout, stats, storage_after = _generate(sides, root, version=2)
        assert sides.difference(rollout) < 2e-5, (model, sizes)
        assert stats.bytes_moved == stats.bytes_had_to_move == sides.bytes_of_adapters()
        assert stats.bytes_moved < of_all or not of_all
        assert storage_after == storage and stats.merge_error is None


def _generate(
    sides: Sides, root: Path, version: int
) -> tuple[Rollout, ReshardStats, dict[str, int]]:
    """Responses with the weights of the policy, the cost of these, and where the base lies."""
    prompts = load_experience(root, Case("llama-biases", "token-mean")).rollout.prompts
    stats = sides.generator.take_weights(version)
    rollout = sides.generator.generate(prompts, SAMPLING, "train").rollout
    sides.generator.sleep()
    slots = sides.engine.weight_slots()
    base = [slot for slot in slots if not is_adapter(slot.piece.name)]
    return rollout, stats, {slot.piece.parameter: slot.parameter.data_ptr() for slot in base}


def _merged(rank: int, world_size: int, root: Path) -> list[float]:
    """The errors of the merge in bfloat16, layout by layout."""
    factory = GroupFactory(timeout_s=600.0)
    errors = []
    for sizes, tp in ((AxisSizes(tp=2), 1), (AxisSizes(ep=2), 2), (AxisSizes(tp=2, pp=2), 2)):
        actor = _actor(factory, root, "qwen3-moe", sizes)
        for version in (1, 2):
            sides = Sides.build(factory, actor, tp, merges=True)
            rollout, stats, _ = _generate(sides, root, version)
            assert sides.difference(rollout) < 2e-5
            assert stats.bytes_moved == stats.bytes_had_to_move
            assert stats.merge_error is not None and 0 < stats.merge_error < 1e-5
            update_actor(
                actor, load_experience(root, Case("qwen3-moe", "token-mean")), plain_ppo.MINI_BATCH
            )

        in_bfloat16 = _actor(factory, root, "qwen3-moe", sizes, "bfloat16")
        stats = Sides.build(factory, in_bfloat16, tp, merges=True).generator.take_weights(1)
        assert stats.merge_error is not None
        errors.append(stats.merge_error)
    return errors


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_inputs(root)
    return root


def test_merged_weights_are_those_of_the_formula(root: Path) -> None:
    run_ranks(4, _merge, root)


def test_an_engine_with_adapters_apart_equals_training_and_gets_only_adapters(root: Path) -> None:
    run_ranks(4, _apart, root)


def test_merged_weights_generate_alike_and_say_what_rounding_loses(root: Path) -> None:
    ranks = run_ranks(4, _merged, root)
    assert all(errors == ranks[0] for errors in ranks)
    assert ranks[0] == pytest.approx([ranks[0][0]] * 3, rel=1e-9)
    assert 1e-3 < ranks[0][0] < 1e-1


def test_ppo_hands_over_adapters_alone_after_its_first_step(tmp_path: Path) -> None:
    keys = [*TP2_PP2, "actor.lora.rank=2", "actor.optim.lr=1e-2", "rollout.verify_reshard=true"]
    apart = Scenario("apart", keys)
    merged = Scenario("merged", [*keys, "rollout.lora=merged"])
    runs = run_scenarios(tmp_path, [apart, merged])
    assert_engine_and_trainer_agree(runs)

    first, second = (step.metrics for step in runs.steps(apart))
    assert 0 < second["reshard/bytes_moved"] < first["reshard/bytes_moved"] / 2
    assert second["reshard/bytes_moved"] == second["reshard/bytes_had_to_move"]
    assert "reshard/merge_error" not in second

    first, second = (step.metrics for step in runs.steps(merged))
    assert second["reshard/bytes_moved"] == first["reshard/bytes_moved"]
    assert first["reshard/merge_error"] == 0.0 < second["reshard/merge_error"] < 1e-2
