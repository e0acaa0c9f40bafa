"""`mrlhf plan --simulate`: runs of every kind on many ranks that are not there, and what it says."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mrlhf.config import SFTConfig, load_config
from mrlhf.config.load import read_any
from mrlhf.simulation.rank import simulate_rank
from tests.e2e.programs import run_program
from tests.models.published import write_published
from tests.oracle import plain_models
from tests.tiny_task import ppo_keys, sft_keys

ALL_AXES = {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("simulation")
    torch.manual_seed(3)
    plain_models.save_models(root)
    write_published(root / "published")
    return root


def _write(root: Path, name: str, keys: dict[str, Any]) -> str:
    keys["trainer"] = {"total_steps": 1, "test_freq": 0, "output_dir": str(root / "run")}
    file = root / f"{name}.yaml"
    file.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return str(file)


def _ppo(root: Path) -> dict[str, Any]:
    keys = ppo_keys(root, {"ppo_mini_batch_size": 4, **ALL_AXES})
    return keys | {"reward": {"terms": [{"name": "exact_match"}]}}


def _mixture(root: Path) -> dict[str, Any]:
    keys = _ppo(root)
    keys["actor"] |= {"path": str(root / "qwen3-moe"), "cp": 1, "ep": 4, "router_replay": "rollout"}
    keys["algorithm"] = {"adv_estimator": "grpo"}
    return keys | {"critic": {}}


def _supervised(root: Path) -> dict[str, Any]:
    return sft_keys(root, 32) | {"model": {"path": str(root / "llama"), **ALL_AXES}}


def _preferences(root: Path) -> dict[str, Any]:
    keys = _supervised(root)
    keys["model"] |= {"lora": {"rank": 4}, "share_prompts": True}
    return keys | {"dpo": {"beta": 0.2}}


def _reward_model(root: Path) -> dict[str, Any]:
    return _supervised(root)


@pytest.mark.parametrize(
    ("make", "program"),
    [(_ppo, "ppo"), (_mixture, "ppo"), (_supervised, "sft"), (_preferences, "dpo"),
     (_reward_model, "reward_model")],
)  # fmt: skip
def test_every_kind_of_run_gets_to_the_end_of_a_step(root: Path, make: Any, program: str) -> None:
    file = _write(root, make.__name__, make(root))
    ended = run_program(
        ["-m", "mrlhf", "plan", "--config", file, "--program", program, "--gpus", "16"]
        + ["--simulate"]
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, last = ended.stdout.splitlines()
    assert last == "every rank gets to the end of a step, and fits h100"
    assert "of 16 ranks are like one of these" in ended.stdout
    rows = [line.split() for line in ended.stdout.splitlines()]
    update = next(row for row in rows if row[:1] in (["update_actor"], ["step"]))
    held = {float(cell) for cell in update[1:-1]}
    assert max(held) == pytest.approx(float(update[-1]), abs=1e-3)
    assert any("allreduce" in row or "reduce_scatter_tensor_coalesced" in row for row in rows)


def test_a_gpu_that_is_too_small_is_named(root: Path) -> None:
    gpu = root / "toy.yaml"
    fields = ("tflops", "memory_gb_s", "link_gb_s", "network_gb_s", "host_gb_s")
    gpu.write_text(yaml.safe_dump({"memory_gb": 1e-4, **dict.fromkeys(fields, 1.0)}), "utf-8")
    file = _write(root, "small", _supervised(root))
    ended = run_program(
        ["-m", "mrlhf", "plan", "--config", file, "--program", "sft", "--gpus", "8", "--simulate"]
        + ["--gpu", str(gpu), "--reserve-gb", "0"]
    )
    assert ended.returncode == 1, ended.stderr
    assert "lacks 0.0 GB in phase step, which holds model/optimizer" in ended.stdout


def test_an_error_of_a_rank_is_told_with_its_phase(root: Path) -> None:
    config = load_config(SFTConfig, _write(root, "error", _supervised(root)), [])
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        one = process.submit(simulate_rank, config, 9, 0, 8).result()
    assert one.failed_in == "start"
    assert "world size 9 is not divisible" in one.error


def test_one_of_a_thousand_ranks_of_70_billion_weights(root: Path) -> None:
    keys = yaml.safe_load(Path("configs/gpu/llama_70b_ppo_64_gpus.yaml").read_text("utf-8"))
    for role in ("actor", "critic"):
        keys[role]["path"] = str(root / "published" / Path(keys[role]["path"]).name)
    config = read_any(None, [_write(root, "large", keys)], ["distributed.device=cuda"])
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        one = process.submit(simulate_rank, config, 1024, 513, 8).result()
    assert not one.error
    # Of the 20 layers of its stage, an eighth in bfloat16, and a copy of the gradients in float32.
    layer = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672)
    held = one.held["update_actor"]
    assert held["actor/params"] == pytest.approx(2 * 20 * layer / 8, rel=0.001)
    assert held["actor/grads"] == 2 * held["actor/params"]
    assert held["actor/optimizer"] == pytest.approx(12 * 20 * layer / 8 / 32, rel=0.001)
    sent = {kind.ranks for kind in one.calls if kind.phase == "reshard"}
    assert sent == {32, 1024}
