"""Interleaved pipelines of any number of micro-batches compute what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.metrics import Tally
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import PackResult
from tests.dist.role_runs import CPU
from tests.ranks import run_ranks

MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 9)
ONE = AxisSizes()
LAYOUTS = {
    2: [AxisSizes(pp=2, vpp=3), AxisSizes(pp=2, vpp=2, pp_layers=(0, 1, 5, 0))],
    4: [AxisSizes(pp=4, vpp=2, pp_layers=(0, 1, 1, 1, 1, 1, 1, 0)), AxisSizes(pp=4)],
}
"""By world size; the model has six layers."""

Numbers = dict[int, tuple[list[float], dict[str, float]]]
"""By the number of micro-batches: a number for each token, and the metrics of a training step."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = transformers.Qwen2Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )

    config.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def wanted(root: Path) -> Numbers:
    (numbers,) = run_ranks(1, _compute, [ONE], str(root))
    return numbers[str(ONE.stages)]


def _compute(rank: int, world_size: int, layouts: list[AxisSizes], root: str) -> dict[str, Numbers]:
    factory = GroupFactory(timeout_s=600.0)
    numbers = {}
    for sizes in layouts:
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, sizes))
        # A sequence has a micro-batch of its own; no step changes a weight.
        section = ActorSection(
            path=root, micro_batch_tokens=1, dtype="float32", optim=ActorOptimSection(lr=0.0)
        )
        engine = ModelEngine(section, load_spec(root, "lm"), groups, CPU)
        engine.initialise(seed=5)
        engine.attach_optimizer(section.optim, total_updates=1)
        numbers[str(sizes.stages)] = {count: _passes(engine, count) for count in MICRO_BATCHES}
    return numbers


def _passes(engine: ModelEngine, count: int) -> tuple[list[float], dict[str, float]]:
    rows = [[(3 * row + token) % 31 for token in range(3 + row % 4)] for row in range(count)]
    sequences = Sequences.of(rows, [1 + row % 2 for row in range(count)])
    packs = engine.cut(sequences, "response").packs
    assert len(packs) == count

    def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
        scalar = (output.square().mean() + output[:, 0].sum()) / count
        tally = Tally()
        tally.add("actor/pg_loss", scalar.detach().clone(), 1)
        return scalar, PackResult(tally)

    table = engine.per_token(
        packs, (count, sequences.width), lambda output, number: output.sum(-1)[None]
    )
    result = engine.train_mini_batch(packs, loss, "actor")
    total = engine.metrics_of([result])
    return table.flatten().tolist(), engine.end_update("actor", total)


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_any_number_of_micro_batches(root: Path, wanted: Numbers, world_size: int) -> None:
    ranks = run_ranks(world_size, _compute, LAYOUTS[world_size], str(root))
    for numbers in ranks:
        assert numbers.keys() == {str(sizes.stages) for sizes in LAYOUTS[world_size]}
        for label, of_layout in numbers.items():
            for count, (table, metrics) in of_layout.items():
                title = f"{label}, {count} micro-batches"
                expected_table, expected = wanted[count]
                assert table == pytest.approx(expected_table, rel=1e-4, abs=1e-4), title
                assert metrics["actor/grad_norm"] > 0.1
                for name, value in expected.items():
                    assert metrics[name] == pytest.approx(value, rel=1e-5), f"{title}: {name}"
                assert metrics["perf/bubble/actor"] > 0
