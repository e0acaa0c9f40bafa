"""Runs the demo from data to report, and says in a few lines what happens and what was learned.

Usage: python tools/demo.py
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

OUTPUT = Path("runs/demo")
INTERRUPTED = 130


@dataclass(frozen=True)
class Stage:
    """One command of the demo."""

    title: str  # what it does, in words
    command: str  # as a user types it
    # Whether it shows its progress itself; otherwise its output is only shown if it fails.
    has_view: bool = False


STAGES = (
    Stage(
        'making sums, such as "37+48=" -> "85", and answers, some of them wrong',
        f"python tools/prepare_data.py arithmetic --out {OUTPUT}/data",
    ),
    Stage(
        "training a start policy on these answers (1,200 steps, two processes)",
        "mrlhf train-sft -n 2 --config configs/demo_sft_cpu.yaml "
        "trainer.console=view trainer.log_freq=100 trainer.overwrite=true",
        has_view=True,
    ),
    Stage(
        "improving it by PPO, where a right answer is the reward (60 steps, four processes)",
        "mrlhf train-ppo -n 4 --config configs/demo_cpu.yaml "
        "trainer.console=view trainer.log_freq=10 trainer.overwrite=true",
        has_view=True,
    ),
    Stage("writing the report", f"python tools/report.py {OUTPUT}"),
)


def main() -> int:
    """Run the stages; 0 if all succeed, otherwise the exit code of the one that fails."""
    console = Console(highlight=False, soft_wrap=True)
    for number, stage in enumerate(STAGES, start=1):
        console.print(f"{number}/{len(STAGES)} {stage.title}", style="bold")
        console.print(f"    $ {stage.command}", style="dim", markup=False)

        began = time.monotonic()
        code = run(stage)
        if code:
            console.print(f"    failed with exit code {code}", style="bold red")
            return code
        console.print(f"    done in {time.monotonic() - began:.0f} s", style="green")

    tell_result(console)
    return 0


def run(stage: Stage) -> int:
    """Run a stage with the programs of this environment; returns its exit code."""
    name, *arguments = shlex.split(stage.command)
    program = Path(sys.executable).with_name(name)
    output = None if stage.has_view else subprocess.PIPE
    done = subprocess.run([program, *arguments], stdout=output, stderr=output, text=True)
    if done.returncode and not stage.has_view:
        sys.stderr.write(done.stdout + done.stderr)
    return done.returncode


def tell_result(console: Console) -> None:
    """Say what was learned, and where to read on."""
    summary = json.loads((OUTPUT / "summary.json").read_text(encoding="utf-8"))
    start = summary["start_sampled_accuracy"]
    final = summary["final_sampled_accuracy"]
    console.print(
        f"\nlearned: {start:.0%} -> {final:.0%} right answers to sums that it has not seen",
        style="bold green",
    )
    console.print(f"open     {OUTPUT}/report.html in a browser: curves, answers, where time went")
    activate = Path(sys.prefix, "bin", "activate")
    if activate.is_file():
        shown = os.path.relpath(activate)
        console.print(f"go on    source {shown}, then the commands of README.md work")
    console.print("read     docs/step.md: what happens in a step")
    console.print("         docs/your_own_task.md: a task of your own")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
