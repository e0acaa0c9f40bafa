"""configs/recipes/lora/README.md is followed, all its commands run, and its numbers come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.recipes import follow
from tests.pages import commands_of

COMMANDS = commands_of("configs/recipes/lora/README.md")
RUNS = ("ppo", "ppo_lora", "grpo", "grpo_lora")


@pytest.fixture(scope="module")
def runs(start_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the page's runs."""
    directory = tmp_path_factory.mktemp("lora")
    follow(COMMANDS, {}, start_policy, directory)
    return directory / "runs" / "lora"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns(runs: Path, name: str) -> None:
    """The least of all runs of the page ended at 0.92; a start has 0.5."""
    summary = json.loads((runs / name / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 30
    assert summary["start_sampled_accuracy"] < 0.65
    assert summary["final_sampled_accuracy"] > 0.9


def test_adapters_reach_what_full_training_reaches(runs: Path) -> None:
    """Within 0.03: four samples of 500 prompts have a standard error of about 0.005."""
    finals = {}
    for name in RUNS:
        summary = json.loads((runs / name / "summary.json").read_text(encoding="utf-8"))
        finals[name] = summary["final_sampled_accuracy"]
    assert finals["ppo_lora"] > finals["ppo"] - 0.03
    assert finals["grpo_lora"] > finals["grpo"] - 0.03


def test_adapters_alone_are_exported(runs: Path) -> None:
    for name in RUNS:
        exported = (runs / name / "actor" / "adapter_model.safetensors").is_file()
        assert exported == name.endswith("_lora")


def test_the_report_compares_the_runs(runs: Path) -> None:
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in RUNS)
