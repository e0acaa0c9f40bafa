"""Follows the page of a recipe in configs/recipes/ that begins with the demo's start policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.programs import ROOT, run_commands, succeed
from tools.demo import STAGES


def follow(
    commands: Sequence[str], files: Mapping[str, str], start_policy: Path, directory: Path
) -> str:
    """Run all commands but the first two in an empty directory; returns what they print.

    Args:
        commands: of the page; the first two make the demo's data and start policy.
        files: those that the page tells to write.
        start_policy: what the first two commands leave.
        directory: where the others run.
    """
    for command, stage in zip(commands[:2], STAGES[:2], strict=True):
        assert stage.command.startswith(command)

    for name in ("configs", "launch", "tools"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "runs").mkdir()
    (directory / "runs" / "demo").symlink_to(start_policy)
    for name, content in files.items():
        (directory / name).write_text(content, encoding="utf-8")

    done = run_commands(commands[2:], cwd=directory)
    succeed(done)
    return done.stdout
