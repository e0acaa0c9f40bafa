"""What configs/recipes/lora/ ends with over seeds, by rank of the adapters, as a table.

Usage: python benchmarks/lora_seeds.py 1 2 3 [--methods ppo,grpo] [--out DIR]

It needs `runs/demo/`, where `make demo` leaves data and start policy. Each run is one process. A
run that has finished in DIR is not run again. A cell is the mean of the seeds, and all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from demo_seeds import run_stage

RANKS = (0, 1, 8, 32)  # 0: all weights are trained
ADAPTERS = "configs/recipes/lora/lora.yaml"


def main() -> None:
    """Run what is missing, and print a row for each rank as its runs end."""
    parser = argparse.ArgumentParser(description="The LoRA recipe's accuracy over seeds.")
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--methods", default="ppo,grpo")
    parser.add_argument("--out", type=Path, default=Path("runs/lora_seeds"))
    arguments = parser.parse_args()

    print("| method | trained | greedy | sampled |\n|---|---|---|---|")
    for method in arguments.methods.split(","):
        for rank in RANKS:
            outs = [arguments.out / method / f"{rank}_{seed}" for seed in arguments.seeds]
            for seed, out in zip(arguments.seeds, outs, strict=True):
                keys = ("--config", ADAPTERS, f"actor.lora.rank={rank}") if rank else ()
                run_stage("train_ppo", f"recipes/lora/{method}", seed, out, *keys)
            cells = [_cell(outs, kind) for kind in ("accuracy", "sampled_accuracy")]
            trained = f"rank {rank}" if rank else "all weights"
            print(f"| {method} | {trained} | {' | '.join(cells)} |", flush=True)


def _cell(outs: Sequence[Path], kind: str) -> str:
    """What the runs in `outs` ended with."""
    summaries = [json.loads((out / "summary.json").read_text(encoding="utf-8")) for out in outs]
    finals = [summary[f"final_{kind}"] for summary in summaries]
    return f"**{fmean(finals):.3f}** ({', '.join(f'{final:.3f}' for final in finals)})"


if __name__ == "__main__":
    main()
