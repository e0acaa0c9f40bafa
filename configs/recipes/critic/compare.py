"""Compares runs on the arithmetic task over seeds, and writes tables of what they reached.

Usage: python configs/recipes/critic/compare.py --out DIR [--seeds N]

It needs the start policy and the data of `make demo`. Each run trains on 128 responses a step for
40 steps, so that all draw about equally many tokens. It does not know how a run works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comparison import read, run, spread, table

STEPS = 40
EXPLAINED = "critic/vf_explained_var"
BASE = ("--config", "configs/arithmetic_cpu.yaml")
SHARED = (f"trainer.total_steps={STEPS}", "trainer.overwrite=true")
# 128 responses a step, in two optimizer steps of the policy.
METHODS = {
    "grpo": ("algorithm.preset=grpo", "rollout.n=8", "data.train_batch_size=16",
             "actor.ppo_mini_batch_size=8"),
    "sao": ("algorithm.preset=sao", "trainer.critic_warmup=6", "data.train_batch_size=128",
            "actor.ppo_mini_batch_size=64"),
}  # fmt: skip
METHODS["sao, no warm-up"] = (*METHODS["sao"], "trainer.critic_warmup=0")
METHODS["sao, no warm-up, critic trained before"] = METHODS["sao, no warm-up"]


def main() -> int:
    """Run everything, and print the tables."""
    parser = argparse.ArgumentParser(description="Compare methods on the arithmetic task.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    critic = train_critic(arguments.out)

    rows: dict[str, list[list[dict[str, float]]]] = {name: [] for name in METHODS}
    for seed in range(1, arguments.seeds + 1):
        for number, (name, keys) in enumerate(METHODS.items()):
            out = arguments.out / f"{number}_seed_{seed}"
            own = [f"critic.path={critic}"] if name.endswith("before") else []
            run(
                "train-ppo",
                [*BASE, *SHARED, *keys, *own, f"seed={seed}", f"trainer.output_dir={out}"],
            )
            rows[name].append([row for row in read(out) if row["step"]])
    print(compare(rows))
    return 0


def train_critic(out: Path) -> Path:
    """Train a critic on two answers of the start policy to each prompt; the model's directory."""
    start = "runs/demo/sft/model"
    samples = out / "start.jsonl"
    run("generate", ["--model", start, "--prompts", "runs/demo/data/train.jsonl",
                     "--out", str(samples), "--n", "2", "--max-response-length", "5", "--overwrite",
                     "reward.terms=[{name: exact_match}]", "data.max_prompt_length=8"])  # fmt: skip
    run("train-critic", [f"model.path={start}", f"data.train_files={samples}",
                         "model.freeze='*.self_attn.*'", "optim.lr=1e-3", "data.batch_size=512",
                         "data.max_length=16", "trainer.total_steps=90", "trainer.test_freq=30",
                         "trainer.overwrite=true",
                         f"trainer.output_dir={out / 'critic'}"])  # fmt: skip
    return out / "critic" / "model"


def compare(runs: dict[str, list[list[dict[str, float]]]]) -> str:
    """What each method reached, as a table of Markdown: mean and standard deviation over seeds."""
    aims = [reward(rows, STEPS) for rows in runs["sao, no warm-up"]]
    cells = {}
    for name, seeds in runs.items():
        accuracy = [rows[-1]["val/arithmetic/acc@1"] for rows in seeds]
        last = [reward(rows, STEPS) for rows in seeds]
        explained = [rows[-1][EXPLAINED] for rows in seeds if EXPLAINED in rows[-1]]
        steps = [float(until(rows, aim)) for rows, aim in zip(seeds, aims, strict=True)]
        cells[name] = [spread(accuracy), spread(last), spread(explained), spread(steps, 1)]
    head = ("method", "accuracy", "reward of the last steps", "explained variance", "steps")
    return table(head, cells)


def reward(rows: Sequence[dict[str, float]], step: int) -> float:
    """The mean reward of the ten steps up to `step`."""
    return statistics.mean(row["critic/score/mean"] for row in rows[max(0, step - 10) : step])


def until(rows: Sequence[dict[str, float]], aim: float) -> int:
    """The first step from which on ten steps have the reward `aim`; one more than all if none."""
    return next((n for n in range(10, len(rows) + 1) if reward(rows, n) >= aim), len(rows) + 1)


if __name__ == "__main__":
    sys.exit(main())
