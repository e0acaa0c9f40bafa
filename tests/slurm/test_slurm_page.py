"""docs/slurm.md is right: its commands run as far as Slurm, and its variables are the script's."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from mrlhf.commands.init import FOLDERS
from tests.e2e.programs import ROOT
from tests.pages import commands_of

PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / "launch" / "slurm" / "train_ppo.sbatch").read_text(encoding="utf-8")

# In place of Slurm: `sbatch [options] SCRIPT [arguments]` becomes the script's own dry run.
SBATCH = """
sbatch() {
    local options=()
    while [[ $1 != *.sbatch ]]; do options+=("$1"); shift; done
    bash "$1" --dry-run "${options[@]}" -- "${@:2}"
}
"""


def test_its_commands_run(tmp_path: Path) -> None:
    commands = [
        *commands_of("docs/slurm.md", "sbatch|sweep"),
        *commands_of("README.md", "^sbatch "),
    ]
    assert len(commands) == 10

    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "runs").mkdir()
    environment = {name: text for name, text in os.environ.items() if "SLURM" not in name}
    for command in commands:
        done = subprocess.run(
            ["bash", "-euc", SBATCH + command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("launch/torchrun.py") == command.count(".sbatch"), command


def test_its_variables_are_those_of_the_script() -> None:
    header = re.findall(r"^#   ([A-Z_]+) {2,}", SCRIPT, re.MULTILINE)
    section = PAGE.split("\n## Variables\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| `([A-Z_]+)` \|", section, re.MULTILINE)
    assert len(table) == 13
    assert table == header

    body = SCRIPT.split("set -euo pipefail")[1]
    for name in header:
        assert f"${{{name}:" in body, f"the script does not read {name}"


def test_the_image_gets_all_that_the_package_is_built_of() -> None:
    recipe = (ROOT / "launch" / "slurm" / "Dockerfile").read_text(encoding="utf-8")
    assert {f"COPY {name} /tmp/mrlhf/{name}" for name in (*FOLDERS, "mrlhf")} <= set(
        recipe.splitlines()
    )
