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
TUTORIAL = "docs/tutorial.md"
ACCURACY = re.compile(r"^[a-h]{4}> [a-h]+, accuracy (0\.\d\d|1\.00)$", re.MULTILINE)


def follow(home: Path, page: str, commands: list[str]) -> str:
    """Write the page's files and run its commands in turn; returns what they print."""
    written = home / "written" / Path(page).stem
    for name, content in files(page).items():
        (written / name).parent.mkdir(parents=True, exist_ok=True)
        (written / name).write_text(content, encoding="utf-8")

    # Compiled kernels are kept in the cache folder.
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    begin = [
        command.replace("mkdir", "mkdir -p")
        for command in commands_of("docs/your_own_task.md", "^(export|mkdir)")
    ]
    done = run_commands(
        [*begin, f"cp -r {written}/. .", *commands],
        cwd=home,
        variables={"HOME": str(home), "XDG_CACHE_HOME": caches},
    )
    succeed(done)
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home directory of a reader, in which the copy of mrlhf lies."""
    directory = tmp_path_factory.mktemp("home")
    (directory / "mrlhf").symlink_to(ROOT)
    return directory


@pytest.fixture(scope="module")
def followed(home: Path) -> str:
    """What the commands of the first page print."""
    assert list(files(PAGE)) == [
        *("make_task.py", "model/config.json", "sft.yaml", "order.py", "grpo.yaml", "use.py")
    ]
    return follow(home, PAGE, commands_of("docs/your_own_task.md", r"^(python|mrlhf)"))


def test_the_page_leads_from_an_empty_directory_to_a_policy(home: Path, followed: str) -> None:
    output = followed
    runs = home / "my_task" / "runs"
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
    accuracy = ACCURACY.search(output)
    assert accuracy is not None
    assert float(accuracy[1]) == pytest.approx(steps[-1]["val/test/acc@1"], abs=0.011)


@pytest.mark.usefixtures("followed")
def test_the_tutorial_goes_on_to_a_reward_model_and_ppo(home: Path) -> None:
    assert list(files(TUTORIAL)) == ["make_pairs.py", "rm.yaml", "ppo.yaml"]
    output = follow(home, TUTORIAL, commands_of("docs/tutorial.md", r"^(python|mrlhf)"))
    runs = home / "my_task" / "runs"

    assert read_lines(runs / "rm/metrics.jsonl")[-1]["val/accuracy"] > 0.95

    # The reward model's score rises in both runs; what people want does in one of them.
    first, held_back = (read_lines(runs / run / "metrics.jsonl") for run in ("ppo", "ppo_kl"))
    rewards = [step["val/test/reward_mean"] for step in first if "val/test/reward_mean" in step]
    assert rewards == sorted(rewards) and rewards[-1] > rewards[0] + 5
    accuracies = [step["val/test/acc@1"] for step in first if "val/test/acc@1" in step]
    assert accuracies[1] > 0.5 and accuracies[-1] < 0.5
    assert held_back[-1]["val/test/acc@1"] > 0.9
    alarms = [line["name"] for line in read_lines(runs / "ppo" / "alarms.jsonl")]
    assert "kl_explosion" in alarms and "held_out" in alarms

    wrong, early, right = (float(found[1]) for found in ACCURACY.finditer(output))
    assert wrong < 0.5 and early > 0.5 and right > 0.9
    assert (home / "my_task" / "report.html").stat().st_size > 10_000
