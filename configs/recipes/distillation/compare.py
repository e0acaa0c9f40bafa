"""Compares ways to teach a small policy the sums of a larger one, over seeds.

Usage: python configs/recipes/distillation/compare.py --out DIR [--seeds N] [--steps N]

It needs what `make demo` leaves: the data, the start policy and the policy after PPO, which is the
teacher. Each method sees 128 responses for each of its steps. It does not know how a run works.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comparison import read, run, spread, table

DATA = "runs/demo/data"
BASE = ("--config", "configs/arithmetic_cpu.yaml", "trainer.overwrite=true", "actor.tp=1")
RATE = ("optim.lr=1e-3", "optim.lr_decay_style=linear", "optim.min_lr_ratio=0.1")
SFT = "SFT on samples of the teacher"
# One response to each prompt, which the reward does not judge.
TAUGHT = ("algorithm.preset=flash_reinforce", "actor.loss_agg_mode=token-mean",
          "reward.terms=[{name: exact_match, weight: 0}]")  # fmt: skip
# 128 responses a step, in two optimizer steps.
BY_128 = (*TAUGHT, "data.train_batch_size=128", "actor.ppo_mini_batch_size=64")
ON_POLICY = {
    "distillation, `kl: reverse`": (*BY_128, "algorithm.distillation.kl=reverse"),
    "distillation, `kl: forward`": (*BY_128, "algorithm.distillation.kl=forward"),
    "GRPO, no teacher": ("algorithm.preset=grpo", "rollout.n=8", "data.train_batch_size=16",
                         "actor.ppo_mini_batch_size=8", "actor.optim.lr=4e-4"),
}  # fmt: skip
TOP_P = (1.0, 0.9, 0.7)


def main() -> int:
    """Run everything, and print the tables."""
    parser = argparse.ArgumentParser(description="Compare ways to teach a small policy.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of 128 responses each")
    parser.add_argument("--teacher", default="runs/demo/actor", help="directory of the model")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    start = train_start(out, 30 * options.steps)
    samples = draw_samples(options.teacher, out)

    reached = {
        "the teacher": [measure(options.teacher, options.teacher, out / "of_teacher")],
        "the student before": [measure(start, options.teacher, out / "of_start")],
        **{name: [] for name in (SFT, *ON_POLICY)},
    }
    for seed in range(1, options.seeds + 1):
        for number, name in enumerate((SFT, *ON_POLICY)):
            trained = out / f"{number}_seed_{seed}"
            own = [f"trainer.output_dir={trained}", f"seed={seed}"]
            if name == SFT:
                train_on_samples(start, samples, 2 * options.steps, own)
            else:
                keys = [*ON_POLICY[name], f"trainer.total_steps={options.steps}", *own]
                keys += [] if name.startswith("GRPO") else [f"teacher.path={options.teacher}"]
                train_on_policy(start, keys)
            model = trained / ("model" if name == SFT else "actor")
            reached[name].append(measure(str(model), options.teacher, out / f"of_{trained.name}"))

    head = ("method", "greedy accuracy", "sampled accuracy", "divergence, nats a token")
    rows = {
        name: [spread(figures) for figures in zip(*seeds, strict=True)]
        for name, seeds in reached.items()
    }
    print(table(head, rows), compare_engine(start, out), sep="\n\n")
    return 0


def train_start(out: Path, steps: int) -> str:
    """Train the student as the demo trains its start policy; the model's directory."""
    run("train-sft", ["--config", "configs/demo_sft_cpu.yaml", f"trainer.total_steps={steps}",
                      "model.path=configs/recipes/distillation/student", "trainer.overwrite=true",
                      f"trainer.output_dir={out / 'start'}"])  # fmt: skip
    return str(out / "start" / "model")


def draw_samples(teacher: str, out: Path) -> str:
    """Draw an answer of the teacher to each prompt; the file."""
    samples = str(out / "samples.jsonl")
    run("generate", ["--model", teacher, "--prompts", f"{DATA}/train.jsonl", "--out", samples,
                     "--max-response-length", "5", "--batch", "1024", "--overwrite",
                     "data.max_prompt_length=8"])  # fmt: skip
    return samples


def train_on_samples(start: str, samples: str, steps: int, keys: list[str]) -> None:
    """SFT: 64 samples, which no other step sees, in each optimizer step."""
    run("train-sft", [f"model.path={start}", f"data.train_files={samples}", "data.batch_size=64",
                      "data.max_length=16", "trainer.overwrite=true", *RATE,
                      f"trainer.total_steps={steps}", *keys])  # fmt: skip


def train_on_policy(start: str, keys: list[str]) -> None:
    """Train on the student's own responses."""
    rate = [f"actor.{key}" for key in RATE]
    run("train-ppo", [*BASE, f"actor.path={start}", "data.val_files=[]", *rate, *keys])


def measure(model: str, teacher: str, out: Path) -> tuple[float, float, float]:
    """The share of right answers to held-out sums, greedy and sampled, and KL(model, teacher).

    A run of one step validates before it, and says how far the policy is from the teacher on its
    own responses before the update.
    """
    held_out = f"{DATA}/held_out.jsonl"
    run("train-ppo", [*BASE, *TAUGHT, f"actor.path={model}", f"teacher.path={teacher}",
                      f"data.train_files={held_out}", f"data.val_files={held_out}",
                      "data.train_batch_size=500", "actor.ppo_mini_batch_size=500",
                      "trainer.val_sampled=true", "trainer.val_n=4", "trainer.total_steps=1",
                      f"trainer.output_dir={out}"])  # fmt: skip
    before, step = read(out)
    return (before["val/arithmetic/acc@1"], before["val_sampled/arithmetic/acc@1"],
            step["actor/distillation_kl"])  # fmt: skip


def compare_engine(model: str, out: Path) -> str:
    """How far trainer and engine are apart before the first update with top-p, as a table."""
    metrics = ("rollout_corr/kl", "rollout_corr/ppl_ratio", "training/rollout_probs_diff_max")
    rows = {}
    for top_p in TOP_P:
        place = out / f"top_p_{top_p}"
        keys = [*ON_POLICY["GRPO, no teacher"], f"rollout.top_p={top_p}", "trainer.total_steps=1"]
        train_on_policy(model, [*keys, f"trainer.output_dir={place}"])
        (step,) = (row for row in read(place) if row["step"])
        rows[str(top_p)] = [f"{step[name]:.2g}" for name in metrics]
    return table(("`rollout.top_p`", *(f"`{name}`" for name in metrics)), rows)


if __name__ == "__main__":
    sys.exit(main())
