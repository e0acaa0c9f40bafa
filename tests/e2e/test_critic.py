"""docs/critic.md is followed: a critic is trained on stored rollouts, and PPO goes on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrlhf.config import PPOConfig, load_config
from mrlhf.errors import CheckpointError
from mrlhf.inputs.paths import require_paths
from tests.e2e.programs import ROOT, read_lines, run_program, succeed, torchrun
from tests.e2e.recipes import follow
from tests.pages import commands_of

COMMANDS = commands_of("docs/critic.md")


@pytest.fixture(scope="module")
def place(start_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory in which the page was followed."""
    directory = tmp_path_factory.mktemp("critic")
    follow(["", "", *COMMANDS], {}, start_policy, directory)
    return directory


def _ppo(place: Path, *keys: str) -> list[str]:
    demo = place / "runs" / "demo"
    return [
        "--config",
        str(ROOT / "configs" / "arithmetic_cpu.yaml"),
        f"actor.path={demo}/sft/model",
        f"critic.path={place}/runs/critic/values/model",
        f"data.train_files={demo}/data/train.jsonl",
        f"data.val_files={demo}/data/validation.jsonl",
        f"trainer.output_dir={place}/ppo",
        *keys,
    ]


def test_the_critic_learns_the_mean_of_the_scores(place: Path) -> None:
    """Of the sums half are right, so a value of 0 has a loss of 0.25, and the mean one of 0.125."""
    rows = read_lines(place / "runs/critic/values/metrics.jsonl")
    assert rows[0]["values/vf_loss"] > 0.2 and rows[-1]["val/loss"] < 0.135
    assert {f"val/bias/quarter_{number}" for number in (1, 2, 3, 4)} <= rows[-1].keys()
    summary = json.loads((place / "runs/critic/values/summary.json").read_text())
    assert summary["value_loss"] == rows[-1]["val/loss"]
    succeed(run_program(["tools/report.py", str(place / "runs/critic/values")]))


def test_ppo_goes_on_with_its_state(place: Path) -> None:
    """Its values are right at once, and another schedule than a constant one needs its length."""
    keys = (
        "critic.warm_start=state",
        "trainer.total_steps=1",
        "critic.tp=2",
        "trainer.save_freq=1",
    )
    succeed(torchrun(2, ["launch/train_ppo.py", *_ppo(place, *keys)]))
    first: dict[str, Any] = read_lines(place / "ppo" / "metrics.jsonl")[-1]
    assert abs(first["critic/values/mean"] - first["critic/score/mean"]) < 0.2
    assert abs(first["critic/vf_bias/quarter_1"]) < 0.2

    # 60 optimizer steps behind the moments, then two mini-batches.
    (checkpoint,) = (place / "ppo" / "checkpoints").glob("step_*/manifest.json")
    assert json.loads(checkpoint.read_text())["models"]["critic"]["optimizer_steps"] == 62


def test_a_path_without_a_checkpoint_is_refused(place: Path) -> None:
    start = place / "runs" / "demo" / "sft" / "model"
    arguments = _ppo(
        place,
        "critic.warm_start=state",
        f"critic.path={start}",
        f"trainer.output_dir={place}/other",  # the last one has checkpoints of its own
    )
    config = load_config(PPOConfig, [arguments[1]], arguments[2:])
    with pytest.raises(CheckpointError, match=r"/sft has no whole checkpoint of a critic"):
        require_paths(config)
    refused = run_program(
        ["launch/train_ppo.py", *_ppo(place), "critic.warm_start=state", "--dry-run",
         "critic.optim.lr_decay_style=linear"]
    )  # fmt: skip
    assert refused.returncode == 2
    assert "critic.optim.lr_decay_steps to the training steps of both runs" in refused.stderr
