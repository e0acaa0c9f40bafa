"""A checkpoint of a mixture of experts loads into every layout of its experts, bit by bit.

One family has experts in its second half alone, and numbers that no optimizer knows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.checkpoint.restorer import open_checkpoint
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import Device
from mrlhf.metrics import Tally
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import PackResult
from tests.dist.saved_checkpoints import assert_equal_checkpoints
from tests.models.mixtures import mixture_configs
from tests.ranks import run_ranks

CPU = Device("cpu", torch.device("cpu"), "gloo")
MODELS = {"glm4-moe": "bfloat16", "qwen2-moe": "float32"}
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# With and without the distributed optimizer.
LAYOUTS = {
    1: [(AxisSizes(), True)],
    2: [(AxisSizes(ep=2), True), (AxisSizes(tp=2, etp=1), True), (AxisSizes(pp=2), False)],
    4: [
        (AxisSizes(pp=2, ep=2), True),
        (AxisSizes(tp=2, ep=2), False),
        (AxisSizes(tp=2, ep=2, etp=2), True),
        (AxisSizes(tp=2, ep=4), False),
    ],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a checkpoint of each saved by every layout."""
    path = tmp_path_factory.mktemp("mixtures")
    torch.manual_seed(1)
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_config(mixture_configs(SIZES)[name])
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
        model.save_pretrained(path / name)
    for world_size in LAYOUTS:
        run_ranks(world_size, _save, path)
    return path


def _engine(path: Path, sizes: AxisSizes, distributed: bool, load: bool) -> ModelEngine:
    section = ActorSection(
        path=str(path),
        dtype=MODELS[path.name],
        tp=sizes.tp,
        pp=sizes.pp,
        ep=sizes.ep,
        etp=sizes.etp,
        # What is read from a checkpoint leaves the device and comes back.
        offload=[] if load else ["params", "grads", "optimizer"],
        optim=ActorOptimSection(
            lr=1e-2,
            use_distributed_optimizer=distributed,
            overlap_param_gather=True if distributed else None,
        ),
    )
    layout = ParallelLayout.for_world("actor", dist.get_world_size(), sizes)
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    engine = ModelEngine(section, load_spec(path, "lm"), groups, CPU)
    if load:
        engine.load(path, seed=0)
    engine.attach_optimizer(section.optim, total_updates=1)
    return engine


def _train(engine: ModelEngine) -> float:
    """Take a step; returns the norm of the gradient."""
    tokens = [[row + 3 * column for column in range(6 + row)] for row in range(6)]
    packs = engine.cut(Sequences.of(tokens, [1] * len(tokens)), "last").packs

    def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
        # The gradients of the tensor-parallel ranks are added up.
        scale = 100 * engine.groups.layout.tp
        return output.float().square().sum() / scale, PackResult(Tally())

    step = engine.train_mini_batch(packs, loss, "actor").step
    assert step is not None and step.taken
    return step.grad_norm


def _saver(directory: Path) -> Saver:
    world = dist.group.WORLD
    assert world is not None
    return Saver(directory, RunIdentity("test", {}), world, asynchronous=False)


def _save(rank: int, world_size: int, root: Path) -> None:
    for name in MODELS:
        for number, (sizes, distributed) in enumerate(LAYOUTS[world_size]):
            engine = _engine(root / name, sizes, distributed, load=True)
            _train(engine)
            directory = root / "saved" / name / f"{world_size}-{number}"
            _saver(directory).save(Contents(1, False, {"actor": engine}, {}))
            norm = _train(engine)
            if rank == 0:
                torch.save(norm, directory / "norm")


def _load(rank: int, world_size: int, root: Path) -> int:
    world = dist.group.WORLD
    assert world is not None
    loaded = 0
    for name, dtype in MODELS.items():
        for number, (sizes, distributed) in enumerate(LAYOUTS[world_size]):
            for directory in sorted((root / "saved" / name).iterdir()):
                engine = _engine(root / name, sizes, distributed, load=False)
                checkpoint = open_checkpoint(directory / "step_000001", world)
                checkpoint.load_models({"actor": engine})

                again = root / "again" / f"{name}-{world_size}-{number}-{directory.name}"
                _saver(again).save(Contents(1, False, {"actor": engine}, {}))
                if rank == 0:
                    assert_equal_checkpoints(directory / "step_000001", again / "step_000001")
                wanted = torch.load(directory / "norm", weights_only=True)
                tolerance = 1e-5 if dtype == "float32" else 5e-2
                norm = _train(engine)
                assert norm == pytest.approx(wanted, rel=tolerance), (norm, wanted, name, directory)
                loaded += 1
                dist.barrier()
    return loaded


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_takes_every_checkpoint(root: Path, world_size: int) -> None:
    saved = sum(map(len, LAYOUTS.values()))
    for loaded in run_ranks(world_size, _load, root):
        assert loaded == len(MODELS) * len(LAYOUTS[world_size]) * saved
