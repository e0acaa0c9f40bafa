"""What the demo ends with over seeds: both stages with each seed, as a table.

Usage: python benchmarks/demo_seeds.py 1 2 3 4 5 [--out DIR] [--moe]

Each stage runs in one process, since every layout gives the same figures up to rounding. It needs
`runs/demo/data`, which `make demo` writes. A stage that has finished in DIR is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {"demo": ("actor.tp=1", "actor.pp=1"), "demo_moe": ("actor.ep=1", "actor.pp=1")}


def main() -> None:
    """Run what is missing, and print a row for each seed as it ends."""
    parser = argparse.ArgumentParser(description="The demo's accuracy over seeds.")
    parser.add_argument("seeds", type=int, nargs="+", help="seeds of both stages")
    parser.add_argument("--out", type=Path, default=Path("runs/demo_seeds"))
    parser.add_argument("--moe", action="store_true", help="the demo with a mixture of experts")
    arguments = parser.parse_args()

    name = "demo_moe" if arguments.moe else "demo"
    print("| seed | greedy after SFT | greedy after RL | sampled after SFT | sampled after RL |")
    print("|---|---|---|---|---|")
    for seed in arguments.seeds:
        summary = run_seed(name, seed, arguments.out / name / str(seed))
        figures = [
            f"{summary[f'{when}_{kind}']:.3f}"
            for kind in ("accuracy", "sampled_accuracy")
            for when in ("start", "final")
        ]
        print(f"| {seed} | {' | '.join(figures)} |", flush=True)


def run_seed(name: str, seed: int, out: Path) -> dict[str, Any]:
    """Both stages with `seed`; returns the summary of the second."""
    sft_model = "model.ep=1" if name == "demo_moe" else "model.tp=1"
    run_stage("train_sft", f"{name}_sft_cpu", seed, out / "sft", sft_model)

    start = f"actor.path={out}/sft/model"
    run_stage("train_ppo", f"{name}_cpu", seed, out, start, *LAYOUTS[name])
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def run_stage(program: str, config: str, seed: int, out: Path, *keys: str) -> None:
    """Run a launcher in one process, unless its summary is there."""
    if (out / "summary.json").exists():
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [f"launch/{program}.py", "--config", f"configs/{config}.yaml"]
    command += [f"seed={seed}", f"trainer.output_dir={out}", "trainer.console=quiet", *keys]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main()
