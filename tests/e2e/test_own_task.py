"""docs/your_own_task.md is followed from an empty directory: files are written, commands are run.

The policy that it trains must have learned the task, also for transformers.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, read_lines, run_commands, succeed
from tests.pages import commands_of, files

PAGE = "docs/your_own_task.md"


def follow(home: Path) -> str:
    """Write the page's files and run its commands in turn; returns what they print.

    Args:
        home: an empty home directory, in which the reader's copy of mrlhf lies.
    """
    (home / "mrlhf").symlink_to(ROOT)
    for name, content in files(PAGE).items():
        (home / "written" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "written" / name).write_text(content, encoding="utf-8")

    begin = commands_of("docs/your_own_task.md", r"^(export|mkdir)")
    follow = commands_of("docs/your_own_task.md", r"^(python|torchrun)")
    # Compiled kernels are kept in the cache folder.
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    done = run_commands(
        [*begin, "cp -r ../written/. .", *follow],
        cwd=home,
        variables={"HOME": str(home), "XDG_CACHE_HOME": caches},
    )
    succeed(done)
    return done.stdout


def test_the_page_leads_from_an_empty_directory_to_a_policy(tmp_path: Path) -> None:
    assert list(files(PAGE)) == [
        *("make_task.py", "model/config.json", "sft.yaml", "order.py", "grpo.yaml", "use.py")
    ]
    output = follow(tmp_path)
    runs = tmp_path / "my_task" / "runs"
    assert output.count("configuration fits 2 ranks") == 2
    assert "{'score': 0.8333333333333333, 'acc': False, 'letters': 1.0}" in output

    # SFT ends at the loss that random orders allow.
    losses = [step["sft/loss"] for step in read_lines(runs / "sft/metrics.jsonl")]
    assert losses[0] > 1.5 and losses[-1] == pytest.approx(0.636, abs=0.06)

    # The right letters in any order get 0.75, and one order in 24 is right.
    start, *steps = read_lines(runs / "grpo/metrics.jsonl")
    assert start["val/test/reward_mean"] < 0.85
    rewards = [step["critic/score/mean"] for step in steps]
    assert len(rewards) == 25
    assert sum(rewards[-5:]) / 5 > 0.85
    assert 0.0 <= steps[0]["reward/order/letters"] <= 1.0
    assert steps[-1]["val/test/reward_mean"] > 0.85

    summary = json.loads((runs / "grpo/summary.json").read_text(encoding="utf-8"))
    assert summary["start_accuracy"] < 0.3 and summary["final_accuracy"] > 0.5
    assert (runs / "grpo/curves.png").is_file()

    # transformers generates what the run's own validation generated.
    accuracy = re.search(r"^[a-h]{4}> [a-h]+, accuracy (0\.\d\d|1\.00)$", output, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) == pytest.approx(steps[-1]["val/test/acc@1"], abs=0.011)
