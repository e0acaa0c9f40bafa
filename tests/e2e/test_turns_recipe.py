"""configs/recipes/turns/README.md is followed, all its commands run, and the game is learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, run_commands, succeed
from tests.pages import commands_of

COMMANDS = commands_of("configs/recipes/turns/README.md")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the page's runs."""
    directory = tmp_path_factory.mktemp("turns")
    for name in ("configs", "launch", "tools"):
        (directory / name).symlink_to(ROOT / name)
    succeed(run_commands(COMMANDS, cwd=directory))
    return directory / "runs" / "turns"


def test_the_policy_needs_fewer_guesses(runs: Path) -> None:
    """Three seeds ended at 0.45 or more; the start has 0.35, a perfect player 0.62."""
    summary = json.loads((runs / "ppo" / "summary.json").read_text(encoding="utf-8"))
    assert summary["start_reward"] < 0.4 and summary["final_reward"] > 0.43
    assert summary["final_sampled_accuracy"] > summary["start_sampled_accuracy"] + 0.08


def test_the_engine_and_the_trainer_agree_on_every_turn(runs: Path) -> None:
    rows = [json.loads(line) for line in (runs / "ppo" / "metrics.jsonl").open(encoding="utf-8")]
    steps = [row for row in rows if row["step"]]
    assert max(row["training/rollout_probs_diff_max"] for row in steps) < 1e-4
    assert all(row["episodes/failed"] == 0 for row in steps)
    assert max(row["episodes/turns/max"] for row in steps) == 8


def test_the_report_is_written(runs: Path) -> None:
    assert "episodes/turns/mean" in (runs / "report.html").read_text(encoding="utf-8")
