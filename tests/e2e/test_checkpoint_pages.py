"""docs/operations.md is right: its commands run, and runs end with the exit codes that it names."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrlhf.checkpoint.manifest import checkpoints_in, read_manifest
from tests.e2e.programs import ROOT, on_terminal, read_lines, run_commands, run_program, succeed
from tests.oracle import plain_models
from tests.pages import commands_of
from tests.tiny_task import ppo_keys, write_tiny_task

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `my.yaml` of the pages: a tiny model and task, and more steps than anybody waits for."""
    root = tmp_path_factory.mktemp("operations")
    plain_models.save_models(root)
    write_tiny_task(root / "data", sft=8)

    content = ppo_keys(root, {"ppo_mini_batch_size": 4})
    content |= {
        "reward": {"terms": [{"name": "exact_match"}]},
        "trainer": {
            "output_dir": str(root / "run"),
            "total_steps": 100_000,
            "val_before_train": False,
        },
    }
    (root / "my.yaml").write_text(yaml.safe_dump(content))
    return root / "my.yaml"


def test_a_run_is_stopped_and_goes_on_as_the_page_says(config: Path) -> None:
    run = config.with_name("run")
    command = _start_command(config)
    stopped, screen = _start_and_stop(command, run)
    assert stopped == _code("interrupted")
    assert re.search(r"\d/100000 steps", screen) and str(run)[:40] in screen
    # The view has the steps, so no line of the log repeats one.
    assert re.search(r"\d\d:\d\d:\d\d INFO PPO on \d ranks?", screen) and "reward" in screen
    assert "step 1/100000" not in screen and "[rank 0]" not in screen
    assert _status(run)["state"] == "interrupted"

    (checkpoint,) = checkpoints_in(run / "checkpoints")
    done = read_manifest(checkpoint).step
    assert done >= 1
    holder = json.loads(succeed(_follow(commands_of("docs/operations.md", "^cat "), run)))
    assert holder["released"] and {"host", "pid", "job", "since"} <= holder.keys()

    succeed(run_program([*command, f"trainer.total_steps={done + 2}"]))
    rows = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, done + 3))
    assert (run / "summary.json").is_file() and (run / "config.1.yaml").is_file()

    status = _status(run)
    assert (status["state"], status["step"], status["of"]) == ("finished", done + 2, done + 2)
    assert status["metrics"].keys() == rows[-1].keys() - {"step"}
    for name in status:
        assert f"`{name}`" in OPERATIONS, name

    refused = run_program([*command, "trainer.resume=never", "--quiet"])
    assert refused.returncode == _code("bad input")
    assert "or give another trainer.output_dir" in refused.stderr

    mistaken = run_program([*command, "trainer.save_frequency=1"])
    assert mistaken.returncode == _code("bad input")


def _start_command(config: Path) -> list[str]:
    """The arguments of Python in the page's first command, for this configuration."""
    (command,) = commands_of("docs/operations.md", r"^python launch/torchrun\.py")
    words = shlex.split(command)[1:]
    return [str(config) if word == "my.yaml" else word for word in words]


def _status(run: Path) -> dict[str, Any]:
    """What `status.json` says; the page's command reads its state."""
    status: dict[str, Any] = json.loads((run / "status.json").read_text(encoding="utf-8"))
    said = succeed(_follow(commands_of("docs/operations.md", r"status\.json"), run))
    assert said.strip() == status["state"]
    return status


def _follow(commands: list[str], run: Path) -> subprocess.CompletedProcess[str]:
    """Run commands of the page, whose output directory is `runs/my`, on this one."""
    return run_commands([command.replace("runs/my", str(run)) for command in commands])


def _start_and_stop(command: list[str], run: Path) -> tuple[int, str]:
    """Start a run on a terminal, and send it the page's signal after its first step.

    Returns:
        Its exit code, and what the terminal has got.
    """
    (stop,) = commands_of("docs/operations.md", "^kill ")
    name = stop.split()[1].removeprefix("-")
    metrics = run / "metrics.jsonl"
    started = on_terminal(
        [sys.executable, *command], ROOT, {"OMP_NUM_THREADS": "1"}, with_output=False
    )

    with started as (process, screen):
        while not (
            metrics.is_file()
            and metrics.read_text().count("\n")
            and b"/100000 steps" in b"".join(screen)
        ):
            assert process.poll() is None, "the run ended before its first step"
            time.sleep(0.05)
        process.send_signal(signal.Signals[f"SIG{name}"])
        code = process.wait()

    return code, b"".join(screen).decode(errors="replace")


def _code(meaning: str) -> int:
    """The exit code that the page gives this meaning."""
    (code,) = re.findall(rf"^\| (\d+) \| {meaning}", OPERATIONS, re.MULTILINE)
    return int(code)
