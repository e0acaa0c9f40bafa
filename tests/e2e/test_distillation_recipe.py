"""configs/recipes/distillation/README.md is followed, with few steps and one seed."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.recipes import follow
from tests.pages import commands_of

(COMMAND,) = commands_of("configs/recipes/distillation/README.md")
# PPO would take longer than all the rest, so the start policy is the teacher.
SHORT = "--seeds 1 --steps 8 --teacher runs/demo/sft/model"


def test_the_student_draws_near_the_teacher(start_policy: Path, tmp_path: Path) -> None:
    printed = follow(["", "", f"{COMMAND} {SHORT}"], {}, start_policy, tmp_path)
    methods, engine = (_rows(table) for table in printed.split("\n\n"))
    divergence = {name: float(cells[-1]) for name, cells in methods.items()}
    assert abs(divergence.pop("the teacher")) < 1e-5

    before = divergence.pop("the student before")
    assert [name.split()[0] for name in divergence] == ["SFT", *["distillation,"] * 2, "GRPO,"]
    # The divergence is what `reverse` trains on; so few steps of the others need not lower it.
    least = divergence["distillation, `kl: reverse`"]
    assert least == min(divergence.values()) and least < before - 0.05

    assert list(engine) == ["1.0", "0.9", "0.7"]
    for kl, ratio, difference in engine.values():
        assert abs(float(kl)) < 1e-5
        assert abs(float(ratio) - 1) < 1e-5 and float(difference) < 1e-4


def _rows(table: str) -> dict[str, list[str]]:
    """The cells of a table by the name of their row."""
    lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return {name: cells for name, *cells in lines}
