"""configs/recipes/overoptimization/README.md is followed, and what it says comes out.

Without a KL the learned reward rises to the end while the true one falls; with it the true one
holds.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.e2e.programs import read_lines
from tests.e2e.recipes import follow
from tests.pages import commands_of, files

COMMANDS = commands_of("configs/recipes/overoptimization/README.md")
FILES = files("configs/recipes/overoptimization/README.md")


@pytest.fixture(scope="module")
def runs(start_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the runs that the page's commands leave."""
    assert list(FILES) == ["over_kl.py"]
    directory = tmp_path_factory.mktemp("overoptimization")
    output = follow(COMMANDS, FILES, start_policy, directory)
    assert "report: runs/overoptimization/report.html" in output
    assert (directory / "over_kl.png").read_bytes().startswith(b"\x89PNG")
    return directory / "runs" / "overoptimization"


def _steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_lines(run / "metrics.jsonl") if record["step"] > 0]


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    return fmean(step[name] for step in steps)


def test_without_a_kl_the_true_reward_rises_and_then_falls(runs: Path) -> None:
    steps = _steps(runs / "free")
    assert _mean(steps[-5:], "critic/score/mean") > _mean(steps[:3], "critic/score/mean") + 1
    best = max(_mean(steps[at : at + 3], "reward/exact_match") for at in range(len(steps) - 2))
    assert best > steps[0]["reward/exact_match"] + 0.05
    assert _mean(steps[-5:], "reward/exact_match") < best - 0.3
    assert _mean(steps[-5:], "actor/reward_kl_penalty") > 1

    alarms = [alarm["name"] for alarm in read_lines(runs / "free" / "alarms.jsonl")]
    assert "kl_explosion" in alarms


def test_with_a_kl_it_holds(runs: Path) -> None:
    free = _steps(runs / "free")
    held = _steps(runs / "kl")
    assert _mean(held[-5:], "reward/exact_match") > held[0]["reward/exact_match"]
    for steps in (free, held):
        assert steps[0]["reward/exact_match"] == pytest.approx(0.5, abs=0.2)
    gap = _mean(held[-5:], "reward/exact_match") - _mean(free[-5:], "reward/exact_match")
    assert gap > 0.3
    assert _mean(held[-5:], "actor/reward_kl_penalty") < 0.5


def test_the_reward_model_ranks_most_pairs_right(runs: Path) -> None:
    *_, last = (row for row in read_lines(runs / "rm" / "metrics.jsonl") if "val/accuracy" in row)
    assert last["val/accuracy"] > 0.8
