"""configs/recipes/dpo/README.md is followed, all its commands run, and its numbers come out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.programs import read_lines
from tests.e2e.recipes import follow
from tests.pages import commands_of, files

COMMANDS = commands_of("configs/recipes/dpo/README.md")
FILES = files("configs/recipes/dpo/README.md")


@pytest.fixture(scope="module")
def followed(start_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory in which all commands but the first two have run, and what they printed."""
    assert (len(COMMANDS), list(FILES)) == (5, ["accuracy.py"])
    directory = tmp_path_factory.mktemp("dpo")
    return directory, follow(COMMANDS, FILES, start_policy, directory)


def test_both_losses_improve_the_answers(followed: tuple[Path, str]) -> None:
    """At least half of the start policy's wrong answers are gone; seen were nine of ten."""
    _, output = followed
    found = re.findall(r"^runs/(demo/sft|dpo|ipo)/model (\d\.\d+)$", output, re.MULTILINE)
    wrong = {name: 1 - float(right) for name, right in found}
    assert wrong["dpo"] < wrong["demo/sft"] / 2
    assert wrong["ipo"] < wrong["demo/sft"] / 2


@pytest.mark.parametrize(("name", "first", "last"), [("dpo", 0.693, 0.675), ("ipo", 1.0, 0.75)])
def test_the_curves_are_as_the_page_has_them(
    followed: tuple[Path, str], name: str, first: float, last: float
) -> None:
    run = followed[0] / "runs" / name
    records = read_lines(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 21))
    assert records[0]["dpo/loss"] == pytest.approx(first, abs=1e-3)
    assert records[-1]["dpo/loss"] < last

    held_out = [record for record in records if "val/loss" in record]
    assert [record["step"] for record in held_out] == [5, 10, 15, 20]
    assert all(record["val/rewards/accuracies"] > 0.9 for record in held_out)
    margins = [record["val/rewards/margins"] for record in held_out]
    assert margins == sorted(margins)
    beta = {"dpo": 0.1, "ipo": 0.5}[name]
    start = held_out[0]["val/logps/chosen"] - held_out[0]["val/rewards/chosen"] / beta
    assert held_out[-1]["val/logps/chosen"] > start

    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["dpo_pair_accuracy"] == held_out[-1]["val/rewards/accuracies"]
    assert summary["dpo_margin"] == margins[-1]
    assert (run / "curves.png").is_file() and (run / "reference_logprobs.npz").is_file()
