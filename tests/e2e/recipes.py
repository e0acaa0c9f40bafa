"""Follows the page of a recipe in configs/recipes/ that begins with the demo's start policy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.programs import ROOT


@dataclass(frozen=True)
class Recipe:
    """What stands on the page.

    Attributes:
        commands: its blocks of commands; the first one makes the demo's data and start policy.
        files: the files that it tells to write.
    """

    commands: list[str]
    files: dict[str, str]


def read_recipe(name: str) -> Recipe:
    """Read the page of `configs/recipes/<name>`, which begins as the demo does."""
    page = (ROOT / "configs" / "recipes" / name / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    files = re.findall(r"Write this as `([\w.]+)`:\n\n```python\n(.*?)```", page, re.DOTALL)

    demo = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndemo:")[1]
    for command in commands[0].splitlines():
        program = command.removeprefix("python ")
        assert f"$(BIN)/{command}" in demo or f"$(BIN)/python {program}" in demo, command
    return Recipe(commands, dict(files))


def follow(recipe: Recipe, start_policy: Path, directory: Path) -> str:
    """Run all commands but the first block in an empty directory; returns what they print."""
    for name in ("configs", "launch", "tools"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "runs").mkdir()
    (directory / "runs" / "demo").symlink_to(start_policy)
    for name, content in recipe.files.items():
        (directory / name).write_text(content, encoding="utf-8")

    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PET_STANDALONE": "1",  # torchrun takes a free port
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *recipe.commands[1:]])],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
