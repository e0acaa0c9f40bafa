"""The configurations in configs/gpu/ pass the dry run on the GPUs that their names say, and fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrlhf.config import PPOConfig, load_config
from mrlhf.preflight import dry_run
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models
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
    config = load_config(PPOConfig, str(path), ["distributed.device=cuda"])
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    taken = footprint(config, specs, _ranks(path))
    assert taken.total(taken.peak) / 1e9 + REST_GB < GPU_GB, taken


def _ranks(path: Path) -> int:
    (number,) = re.findall(r"_(\d+)_gpus?$", path.stem)
    return int(number)
