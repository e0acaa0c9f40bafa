"""`python -m tests.simulation`: runs of every kind, on ranks that are not there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mrlhf.config import SFTConfig, load_config
from mrlhf.config.load import read_any
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models
from tests.e2e.programs import run_program
from tests.models.published import write_published
from tests.oracle import plain_models
from tests.pages import commands_of
from tests.simulation.__main__ import parse
from tests.simulation.job import simulate, simulate_alone
from tests.tiny_task import ppo_keys, sft_keys

ALL_AXES = {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"}
# Else buffers are padded.
WHOLE = {"use_distributed_optimizer": False}


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
    keys = ppo_keys(root, {"ppo_mini_batch_size": 4, "optim": WHOLE, **ALL_AXES})
    return keys | {"reward": {"terms": [{"name": "exact_match"}]}}


def _mixture(root: Path) -> dict[str, Any]:
    keys = _ppo(root)
    keys["actor"] |= {"path": str(root / "qwen3-moe"), "cp": 1, "ep": 4, "router_replay": "rollout"}
    keys["algorithm"] = {"adv_estimator": "grpo"}
    return keys | {"critic": {}}


def _supervised(root: Path) -> dict[str, Any]:
    model = {"path": str(root / "llama"), **ALL_AXES}
    return sft_keys(root, 32) | {"model": model, "optim": WHOLE}


def _preferences(root: Path) -> dict[str, Any]:
    keys = _supervised(root)
    keys["model"] |= {"lora": {"rank": 4}, "share_prompts": True}
    return keys | {"dpo": {"beta": 0.2}}


def _reward_model(root: Path) -> dict[str, Any]:
    return _supervised(root)


@pytest.mark.parametrize(
    ("make", "program", "phase"),
    [
        (_ppo, "ppo", "update_critic"),
        (_mixture, "ppo", "update_actor"),
        (_supervised, "sft", "step"),
        (_preferences, "dpo", "step"),
        (_reward_model, "rm", "step"),
    ],
)
def test_every_kind_of_run_gets_to_the_end_of_a_step(
    root: Path, make: Any, program: Any, phase: str
) -> None:
    file = _write(root, make.__name__, make(root))
    config = read_any(program, [file], ["distributed.device=cuda"])
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    ranks = list(simulate(config, specs, 16, per_machine=8))
    assert [one.error for one in ranks] == [""] * len(ranks)
    assert len(ranks) == 2  # the stages of a pipeline
    role = "model" if phase == "step" else phase.removeprefix("update_")
    planned = footprint(config, specs, 16).sizes
    for owner in ("params", "grads", "optimizer"):
        most = max(one.held[phase][f"{role}/{owner}"] for one in ranks)
        assert most == planned[f"{role}/{owner}"], owner
    for one in ranks:
        assert any(kind.phase == phase and kind.operation == "allreduce" for kind in one.calls)
        assert any(kind.operation == "send" and kind.ranks == 2 for kind in one.calls)


def test_a_gpu_that_is_too_small_is_named(root: Path) -> None:
    gpu = root / "toy.yaml"
    fields = ("tflops", "memory_gb_s", "link_gb_s", "network_gb_s", "host_gb_s")
    gpu.write_text(yaml.safe_dump({"memory_gb": 1e-5, **dict.fromkeys(fields, 1.0)}), "utf-8")
    file = _write(root, "small", _supervised(root))
    command = f"-m tests.simulation --config {file} --program sft --gpus 8 --gpu {gpu}"
    ended = run_program([*command.split(), "--reserve-gb", "0"])
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "the other 6 of 8 ranks are like one of these" in ended.stdout
    assert "rank 0 lacks 0.0 GB in phase step, which holds model/optimizer" in ended.stdout


def test_an_error_of_a_rank_is_told_with_its_phase(root: Path) -> None:
    config = load_config(SFTConfig, _write(root, "error", _supervised(root)), [])
    one = simulate_alone(config, 9, per_machine=8, rank=0)
    assert one.failed_in == "start"
    assert "world size 9 is not divisible" in one.error


def test_one_of_a_thousand_ranks_of_70_billion_weights(root: Path) -> None:
    (command,) = commands_of("docs/parallelism.md", "tests.simulation")
    options = parse(shlex.split(command)[3:])
    (shipped,) = options.config
    keys = yaml.safe_load(Path(shipped).read_text("utf-8"))

    for role in ("actor", "critic"):
        keys[role]["path"] = str(root / "published" / Path(keys[role]["path"]).name)
    overrides = [*options.overrides, "distributed.device=cuda"]
    config = read_any(None, [_write(root, "large", keys)], overrides)

    one = simulate_alone(config, options.gpus, per_machine=8, rank=513)
    assert not one.error
    # Of the 20 layers of its stage, an eighth in bfloat16, and a copy of the gradients in float32.
    layer = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672)
    held = one.held["update_actor"]

    assert held["actor/params"] == pytest.approx(2 * 20 * layer / 8, rel=0.001)
    assert held["actor/grads"] == 2 * held["actor/params"]
    assert held["actor/optimizer"] == pytest.approx(12 * 20 * layer / 8 / 32, rel=0.001)
    sent = {kind.ranks for kind in one.calls if kind.phase == "reshard"}
    assert sent == {32, 1024}
