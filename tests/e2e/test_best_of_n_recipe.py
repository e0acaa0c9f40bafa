"""configs/recipes/best_of_n/README.md is followed: its commands run, and the answers improve."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.programs import read_lines
from tests.e2e.recipes import follow
from tests.pages import commands_of, files


def test_the_best_of_eight_answers_teach(start_policy: Path, tmp_path: Path) -> None:
    commands = commands_of("configs/recipes/best_of_n/README.md")
    assert (len(commands), files("configs/recipes/best_of_n/README.md")) == (6, {})
    follow(commands, {}, start_policy, tmp_path)
    run = tmp_path / "runs" / "best_of_n"

    rows = read_lines(run / "answers.jsonl")
    assert len(rows) == 9000 and all(row["best"] for row in rows)
    drawn = json.loads((run / "answers.summary.json").read_text(encoding="utf-8"))
    right = sum(row["reward"] for row in rows) / len(rows)
    assert right == drawn["best_of_n"] > drawn["reward"]

    wrong = []
    for name in ("start", "tuned"):
        summary = json.loads((run / f"{name}.summary.json").read_text(encoding="utf-8"))
        wrong.append(1 - summary["reward"])
    assert wrong[1] < wrong[0] / 2  # seen were nine of ten of them gone
