"""docs/your_own_task.md is followed from an empty directory: files are written, commands are run.

The policy that it trains must have learned the task, also for transformers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, read_lines

PAGE = (ROOT / "docs" / "your_own_task.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"Write\sthis\sas\s`([\w/.]+)`")


def files() -> dict[str, str]:
    """The files of the page: each stands under a paragraph that tells to write it."""
    found = {}
    before = 0
    for block in BLOCK.finditer(PAGE):
        paragraph = PAGE[before : block.start()].rstrip().split("\n\n")[-1]
        before = block.end()
        if block[1] in ("python", "yaml", "json"):
            name = FILE.search(paragraph)
            assert name is not None, f"no file is named before {block[2][:60]!r}"
            found[name[1]] = block[2]
    return found


def follow(directory: Path) -> str:
    """Write the page's files and run its commands in turn; returns what they print."""
    for name, content in files().items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content, encoding="utf-8")

    script = "\n".join(["set -e", *(text for kind, text in BLOCK.findall(PAGE) if kind == "bash")])
    environment = {
        **os.environ,
        "MRLHF": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PET_STANDALONE": "1",  # torchrun takes a free port
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def test_the_page_leads_from_an_empty_directory_to_a_policy(tmp_path: Path) -> None:
    assert list(files()) == [
        *("make_task.py", "model/config.json", "sft.yaml", "order.py", "grpo.yaml", "use.py")
    ]
    output = follow(tmp_path)
    assert output.count("configuration fits 2 ranks") == 2
    assert "{'score': 0.8333333333333333, 'acc': False, 'letters': 1.0}" in output

    # SFT ends at the loss that random orders allow.
    losses = [step["sft/loss"] for step in read_lines(tmp_path / "runs/sft/metrics.jsonl")]
    assert losses[0] > 1.5 and losses[-1] == pytest.approx(0.636, abs=0.06)

    start, *steps = read_lines(tmp_path / "runs/grpo/metrics.jsonl")
    assert start["val/test/reward_mean"] < 0.85
    rewards = [step["critic/score/mean"] for step in steps]
    assert len(rewards) == 25
    assert sum(rewards[:2]) / 2 < 0.82 and sum(rewards[-5:]) / 5 > 0.93
    assert 0.0 <= steps[0]["reward/order/letters"] <= 1.0
    assert steps[-1]["val/test/reward_mean"] > 0.95

    summary = json.loads((tmp_path / "runs/grpo/summary.json").read_text(encoding="utf-8"))
    assert summary["start_accuracy"] < 0.3 and summary["final_accuracy"] > 0.8
    assert (tmp_path / "runs/grpo/curves.png").is_file()

    # transformers generates what the run's own validation generated.
    accuracy = re.search(r"^[a-h]{4}> [a-h]+, accuracy (0\.\d\d|1\.00)$", output, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) == pytest.approx(steps[-1]["val/test/acc@1"], abs=0.011)
