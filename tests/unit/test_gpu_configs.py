"""The configurations in configs/gpu/ pass the dry run on the GPUs that their names say, and fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrlhf.config import PPOConfig, load_config
from mrlhf.config.sections import RoleSection
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight import dry_run
from mrlhf.preflight.model_bytes import training_bytes
from mrlhf.preflight.model_checks import check_models
from tests import memory_rules
from tests.models.published import write_published

FILES = sorted((Path(__file__).parents[2] / "configs" / "gpu").glob("*.yaml"))
GPU_GB = 80
REST_GB = 10  # of the layer that is being computed, the output layer and NCCL


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu_configs")
    write_published(root / "models")
    return root


@pytest.fixture(autouse=True)
def in_its_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_there_are_four() -> None:
    assert [_ranks(path) for path in FILES] == [64, 16, 8, 1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_dry_run_accepts_it(path: Path) -> None:
    found = dry_run(load_config(PPOConfig, str(path), []), _ranks(path))
    assert all("data/" in line for line in found.missing), found.missing
    last = found.text.splitlines()[-1]
    assert last.startswith(f"what could be checked fits {_ranks(path)} rank")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fits_a_gpu_of_80_gb(path: Path) -> None:
    config = load_config(PPOConfig, str(path), [])
    specs = check_models(config)
    taken = {}
    activations = []
    for name, role in config.trained().items():
        spec = specs[name]
        assert spec is not None
        layout = _layout(name, role, _ranks(path))
        taken[name] = training_bytes(spec, layout, 2, role.optim.use_distributed_optimizer).total
        activations.append(memory_rules.activation_bytes(role, spec, layout))
    taken["activations"] = max(activations)
    taken |= _frozen(config, specs["actor"], _ranks(path))
    assert sum(taken.values()) / 1e9 + REST_GB < GPU_GB, taken


def _frozen(config: PPOConfig, actor: ModelSpec | None, ranks: int) -> dict[str, int]:
    """The bytes of the reference, and of weights that the engine holds beside the actor's."""
    assert actor is not None
    layout = _layout("actor", config.actor, ranks)
    held = training_bytes(actor, layout, 2, True).weights
    tp = config.rollout.tp
    engine = training_bytes(actor, ParallelLayout(tp=tp, etp=tp), 2, True).weights
    if tp == layout.tp and layout.ep == 1:
        engine -= held
    has_reference = config.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    own_reference = has_reference and actor.lora is None
    return {"engine": engine, "reference": held if own_reference else 0}


def _layout(name: str, role: RoleSection, ranks: int) -> ParallelLayout:
    return ParallelLayout.for_world(name, ranks, AxisSizes.of(role))


def _ranks(path: Path) -> int:
    (number,) = re.findall(r"_(\d+)_gpus?$", path.stem)
    return int(number)
