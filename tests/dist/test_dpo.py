"""DPO and IPO equal a plain loop on many layouts; the reference is asked once and then freed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from mrlhf.config.pair_losses import DPOSection
from mrlhf.config.sections import ReferenceSection, RoleSection
from mrlhf.parallel import vocab
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.run.startup import Run
from mrlhf.trainers import reference_logprobs as references
from mrlhf.trainers.dpo import PreferenceOptimization, ScoredPairs
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import (
    CPU,
    OF_THE_LAYOUT,
    Form,
    Setting,
    assert_metrics,
    assert_near,
    assert_weights,
    build_supervised,
)
from tests.oracle import plain_dpo, plain_ppo
from tests.oracle.plain_dpo import Method
from tests.oracle.plain_models import save_models
from tests.ranks import run_ranks

WORLD = 4


@dataclass(frozen=True)
class Case:
    """One way of training; `keys` are of the section of the model, `optim` of its optimizer's."""

    model: str
    method: Method
    keys: dict[str, Any]
    optim: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The layout in words."""
        keys = " ".join(f"{name}={value}" for name, value in self.keys.items())
        return f"{self.model} {self.method.loss_type} {keys}"

    @property
    def clip_grad(self) -> float:
        """The norm that the gradient is clipped to; 0 clips nothing."""
        return float(self.optim.get("clip_grad", 0.0))


SIGMOID = Method("sigmoid", beta=0.3)
SMOOTHED = Method("sigmoid", beta=0.3, label_smoothing=0.2)
IPO = Method("ipo", beta=0.7)
ONE_PACK = {"micro_batch_tokens": 1000}
# Most pairs have a pack of their own.
MANY_PACKS = {"micro_batch_tokens": 2 * plain_dpo.LONGEST}
CASES = [
    Case("llama", SIGMOID, MANY_PACKS),
    Case(
        "llama",
        SMOOTHED,
        {"tp": 2, "pp": 2, "sequence_parallel": True, **MANY_PACKS},
        {"clip_grad": 0.1},
    ),
    # Each sequence is padded to a multiple of twice as many segments as ranks.
    Case("qwen2-tied", SIGMOID, {"cp": 2, "pp": 2, "vpp": 2, "micro_batch_tokens": 40}),
    Case(
        "qwen3",
        IPO,
        {"tp": 2, "cp": 2, "recompute": "full", **ONE_PACK},
        {"use_distributed_optimizer": False},
    ),
    Case("qwen2-moe", SIGMOID, {"ep": 2, "tp": 2, **MANY_PACKS}),
    Case("qwen2-moe", IPO, {"ep": 4, **ONE_PACK}),
]


@dataclass(frozen=True)
class Trained:
    """What a rank sees of a case; tables are float64 [pairs, 2]."""

    metrics: dict[str, float]
    reference: list[list[float]]


def _train_cases(rank: int, world_size: int, root: str) -> dict[str, Trained]:
    """Train each case; the weights go to `<root>/<case>/weights`."""
    factory = GroupFactory(timeout_s=600.0)
    trained = {}
    for number, case in enumerate(CASES):
        # Chunks of few tokens: some hold several pairs, and some pairs fill several.
        rows = 128 if number == 0 else 12
        with (
            mock.patch.object(vocab, "_LEAST_CHUNK_TOKENS", rows),
            mock.patch.dict(vocab._CHUNK_BYTES, {"cpu": 1}),
        ):
            trained[case.name] = _train(Path(root), factory, case, rank, world_size)
    return trained


def _train(root: Path, factory: GroupFactory, case: Case, rank: int, world_size: int) -> Trained:
    directory = root / case.name
    directory.mkdir(exist_ok=True)
    run = Run(CPU, rank, world_size, factory, directory)
    pairs = plain_dpo.make_pairs()
    data = [pairs, plain_dpo.held_out_pairs(pairs)]
    layout = {name: value for name, value in case.keys.items() if name in RoleSection.model_fields}
    reference = ReferenceSection(path=str(root / f"{case.model}-ref"), **layout)
    scored = [
        ScoredPairs(*both)
        for both in zip(data, references.reference_logprobs(reference, run, data, 0), strict=True)
    ]

    sizes = AxisSizes.of(RoleSection(path=".", **layout))
    groups = factory.role_groups(ParallelLayout.for_world("model", world_size, sizes))
    form = Form(case.name, 1000, distributed_optimizer=True, keys=case.keys, optim=case.optim)
    plain = plain_ppo.Case(case.model, "token-mean", clip_grad=case.clip_grad)
    engine = build_supervised(Setting(root, groups, form), plain, case.model, "lm")

    task = PreferenceOptimization(DPOSection(**vars(case.method)), *scored)
    metrics: dict[str, float] = {}
    for rows in plain_dpo.STEPS:
        metrics = task.step(engine, rows)
    metrics |= task.validate(engine)
    engine.export(directory / "weights", 10**9)
    return Trained(metrics, scored[0].reference.tolist())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and after training the weights of each case."""
    directory = tmp_path_factory.mktemp("dpo")
    save_models(directory)
    return directory


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Trained]]:
    """For each rank, what it sees of each case."""
    results: list[dict[str, Trained]] = run_ranks(WORLD, _train_cases, str(root))
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_equals_a_plain_loop(
    root: Path, ranks: list[dict[str, Trained]], case: Case
) -> None:
    pairs = plain_dpo.make_pairs()
    reference = root / f"{case.model}-ref"
    plain = plain_dpo.train(root / case.model, reference, pairs, case.method, case.clip_grad)
    seen = [results[case.name] for results in ranks]

    wanted = plain_dpo.table(reference, pairs)
    for trained in seen:
        reference_table = torch.tensor(trained.reference).float()
        assert_near(reference_table, wanted, atol=2e-5, title="reference")
    free = (*OF_THE_LAYOUT, "dpo/expert_load")
    assert_metrics([trained.metrics for trained in seen], plain.metrics, case.name, free)
    # Two steps of up to 1e-2; a gradient is rounded by up to 4e-6, so a step by 1e-2 * that / EPS.
    assert_weights(root / case.name / "weights", plain.weights, 8e-5, case.name)


def _ask_again(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Ask for the reference's numbers again and again, as runs that start again do."""
    run = Run(CPU, rank, world_size, GroupFactory(timeout_s=600.0), Path(root) / "run")
    file = run.output_dir / "reference_logprobs.npz"
    pairs = plain_dpo.make_pairs()
    engines: list[Any] = []
    make = references.ModelEngine

    def build(*arguments: Any) -> ModelEngine:
        engine = make(*arguments)
        engines.append(weakref.ref(engine))
        return engine

    def ask(model: str, rows: int, **keys: Any) -> list[Any]:
        """The last number of the table, and how many engines were built for it."""
        before = len(engines)
        section = ReferenceSection(path=f"{root}/{model}", **keys)
        some = [plain_dpo.held_out_pairs(pairs), pairs][:rows]
        tables = references.reference_logprobs(section, run, some, seed=0)
        run.begin()
        return [float(tables[-1][-1, -1]), len(engines) - before]

    with mock.patch.object(references, "ModelEngine", build):
        answers = {
            "first": ask("llama", 2),
            "again": ask("llama", 2),
            "on another layout": ask("llama", 2, tp=2, micro_batch_tokens=64),
            "other weights": ask("llama-ref", 2),
            "other pairs": ask("llama-ref", 1),
            "as before": ask("llama-ref", 2),
            "another dtype": ask("llama-ref", 2, dtype="bfloat16"),
        }
        if rank == 0:
            file.write_bytes(file.read_bytes()[:-200])
        torch.distributed.barrier()
        answers["damaged"] = ask("llama-ref", 2)
    answers["alive"] = sum(engine() is not None for engine in engines)
    return answers


def test_a_reference_is_asked_once_and_freed(root: Path) -> None:
    (root / "run").mkdir()
    first, second = run_ranks(2, _ask_again, str(root))
    assert first == second
    asked = {name: answer[1] for name, answer in first.items() if name != "alive"}
    assert asked == {
        "first": 1,
        "again": 0,
        "on another layout": 0,
        "other weights": 1,
        "other pairs": 1,
        "as before": 1,
        "another dtype": 1,
        "damaged": 1,
    }
    assert first["alive"] == 0
    assert first["again"] == [first["first"][0], 0]

    pairs = plain_dpo.make_pairs()
    for name, model in (("first", "llama"), ("other weights", "llama-ref")):
        wanted = float(plain_dpo.table(root / model, pairs)[-1, -1])
        assert first[name][0] == pytest.approx(wanted, abs=2e-5)
    with np.load(root / "run" / "reference_logprobs.npz", allow_pickle=False) as stored:
        assert stored["logprobs"].shape == (plain_dpo.HELD_OUT + len(pairs), 2)
    assert [file.name for file in (root / "run").iterdir()] == ["reference_logprobs.npz"]
