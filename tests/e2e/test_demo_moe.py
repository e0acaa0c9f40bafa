"""The demo with a mixture of experts as shipped, SFT at EP=2 and PPO at EP=2 x PP=2: it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.exported import greedy_accuracy
from tests.e2e.programs import read_lines, run_commands, succeed
from tests.pages import commands_of


@pytest.fixture(scope="module")
def demo(demo_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two commands of docs/models.md leave, in another directory."""
    root = tmp_path_factory.mktemp("demo_moe")
    places = [
        f"data.train_files={demo_data}/sft.jsonl",
        f"data.tokenizer={demo_data}/tokenizer",
        f"trainer.output_dir={root}/sft",
    ]
    train = commands_of("docs/models.md", r"configs/demo_moe_sft_cpu.yaml$")
    logs = {"sft": succeed(run_commands(train, *places))}

    places = [
        f"actor.path={root}/sft/model",
        f"data.train_files={demo_data}/train.jsonl",
        f"data.val_files={demo_data}/validation.jsonl",
        f"data.test_files={demo_data}/held_out.jsonl",
        f"trainer.output_dir={root}",
    ]
    train = commands_of("docs/models.md", r"configs/demo_moe_cpu.yaml$")
    logs["ppo"] = succeed(run_commands(train, *places))
    summary = json.loads((root / "summary.json").read_text())
    return {"root": root, "logs": logs, "summary": summary}


def test_its_layouts(demo: dict[str, Any]) -> None:
    logs = demo["logs"]
    assert "  model        tp 1 x pp 1 (experts ep 2 x etp 1) x dp 2, " in logs["sft"]
    assert "  actor        tp 1 x pp 2 (experts ep 2 x etp 1) x dp 2, " in logs["ppo"]


def test_it_learns(demo: dict[str, Any]) -> None:
    """Greedy answers to the held-out prompts are right; samples keep some of their spread."""
    summary = demo["summary"]
    assert summary["start_sampled_accuracy"] <= 0.7
    assert summary["final_accuracy"] >= 0.9
    assert summary["final_sampled_accuracy"] >= summary["start_sampled_accuracy"] + 0.25


def test_metrics_of_every_step(demo: dict[str, Any]) -> None:
    steps = [line for line in read_lines(demo["root"] / "metrics.jsonl") if line["step"] > 0]
    assert len(steps) == demo["summary"]["steps"]
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 5e-5
        assert step["reshard/bytes_moved"] == step["reshard/bytes_had_to_move"] > 0
        # An expert gets a token at most once, and two of four experts get it.
        assert 1 <= step["actor/expert_load_max"] <= 2
        assert 0 < step["actor/expert_load_entropy"] <= 1


def test_transformers_answers_as_the_run_said(demo: dict[str, Any], demo_data: Path) -> None:
    accuracy = greedy_accuracy(demo["root"] / "actor", demo_data / "held_out.jsonl")
    assert accuracy == demo["summary"]["final_accuracy"]
