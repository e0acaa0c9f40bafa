"""Makes the recordings: metrics of small runs, some with a known failure and some without.

Usage: python tests/recordings/record.py WORK_DIR [NAME ...]

WORK_DIR holds `runs/demo/data` and `runs/demo/sft`, as `make demo` writes them. A recording keeps
the metrics that alarms read. Two failures do not come from a configuration alone: a launcher of
their own makes rank 1 wait in each pass of its engine, or hands over weights once only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
# Only metrics whose names begin so are kept.
KEPT = (
    "actor/entropy",
    "actor/grad_norm",
    "actor/kl_loss",
    "actor/lr",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/reward_kl_penalty",
    "critic/grad_norm",
    "critic/lr",
    "critic/score/",
    "critic/vf_explained_var",
    "critic/vf_loss",
    "dpo/grad_norm",
    "dpo/lr",
    "perf/slowest_replica",
    "perf/slowest_update",
    "response_length/clip_ratio",
    "response_length/mean",
    "reward/",
    "rm/grad_norm",
    "rm/lr",
    "rollout_corr/kl",
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_rs_masked_fraction",
    "se/",
    "sft/grad_norm",
    "sft/lr",
    "timing_s/step",
    "training/equal_",
    "training/rollout_probs_diff_mean",
    "val/",
)

REWARDS = """
def length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 8


def half(data_source, solution_str, ground_truth, extra_info):
    return 0.5
"""
# The launcher of PPO, with an engine that keeps its first weights.
STALE = """
import runpy
import sys

from mrlhf.rollout.generator import Generator

take_weights = Generator.take_weights
first = []


def take_once(self, version):
    if not first:
        first.append(take_weights(self, version))
    else:
        self.engine.wake()
        self.engine.commit(version)
    return first[0]


Generator.take_weights = take_once
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
# The launcher of PPO, with an engine that is slow on rank 1.
SLOW = """
import os
import runpy
import sys
import time

from mrlhf.inference.native.engine import NativeEngine

step = NativeEngine.step


def slow_step(self):
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
    step(self)


NativeEngine.step = slow_step
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
# The launcher of supervised fine-tuning, with a model that is slow on rank 1.
SLOW_MODEL = """
import os
import runpy
import sys
import time

from mrlhf.parallel.schedule import Pipeline

forward_pack = Pipeline._forward_pack


def slow_pack(self, *arguments):
    if os.environ["RANK"] == "1":
        time.sleep(3.0)
    return forward_pack(self, *arguments)


Pipeline._forward_pack = slow_pack
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
_CORRECTION = "algorithm.rollout_correction"
_BASE = (
    "launch/train_ppo.py",
    "--config=configs/arithmetic_cpu.yaml",
    "actor.tp=1",
    "data.val_files=[]",
    "trainer.log_samples=0",
)
_SFT = (
    "launch/train_sft.py",
    "--config=configs/demo_sft_cpu.yaml",
    "data.batch_size=64",
    "optim.lr_warmup_steps=4",
)


@dataclass(frozen=True)
class Recorded:
    """How a run is made."""

    # Of torchrun: the launcher, its configurations and overrides. `REWARDS` stands for a file of
    # reward functions, and `ROWS` for rows of which one batch is nonsense.
    arguments: tuple[str, ...]
    steps: int = 16  # training steps
    ranks: int = 1  # processes
    # The text of a program that changes something and then runs the launcher.
    through: str | None = None


def _ppo(*overrides: str, steps: int = 16, ranks: int = 1, through: str | None = None) -> Recorded:
    return Recorded((*_BASE, *overrides), steps, ranks, through)


def _preset(name: str, *overrides: str, seed: int) -> Recorded:
    return _ppo(f"--config=configs/algorithms/{name}.yaml", *overrides, f"seed={seed}", steps=20)


# By the alarm that each of them raises.
FAILING = {
    "held_out": _ppo(
        "reward.terms=[{name: 'REWARDS:length'}, {name: exact_match, weight: 0.0}]",
        "data.val_files=runs/demo/data/validation.jsonl",
        "trainer.test_freq=4",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.01",
    ),
    "kl_explosion": _ppo("actor.optim.lr=1.0e-2", steps=6),
    "entropy_collapse": _ppo("actor.dtype=bfloat16", "actor.optim.lr=1.0e-2", steps=12),
    "over_optimisation": _ppo(
        "reward.terms=[{name: 'REWARDS:length'}]",
        "data.max_response_length=16",
        "data.train_batch_size=128",
        "rollout.temperature=2.0",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=1.0e-4",
        "actor.optim.lr=1.0e-3",
        steps=24,
    ),
    "value_loss_not_falling": _ppo("critic.optim.lr=1.0e-9"),
    "clip_fraction": _ppo(
        "actor.ppo_epochs=8",
        "actor.clip_ratio=1.0e-5",
        "actor.optim.lr=1.0e-3",
        "rollout.temperature=2.0",
        steps=3,
    ),
    "engine_mismatch": _ppo("actor.tp=2", steps=6, ranks=2, through=STALE),
    "truncation": _ppo("data.max_response_length=2", steps=6),
    "equal_scores": _ppo("reward.terms=[{name: 'REWARDS:half'}]", steps=4),
    "equal_groups": _ppo(
        "--config=configs/algorithms/grpo.yaml", "rollout.n=4", "rollout.temperature=0.01", steps=4
    ),
    "gradient_spike": Recorded(
        (
            *_SFT,
            "model.path=runs/demo/sft/model",
            "model.init=checkpoint",
            "data.train_files=ROWS",
            "data.shuffle=false",
            "optim.lr=1.0e-4",
        ),
        steps=20,
    ),
    "zero_learning_rate": _ppo("actor.optim.lr=0.0", steps=4),
    "constant_term": _ppo("reward.terms=[{name: exact_match}, {name: format, weight: 0.1}]"),
    "slow_rank": _ppo(steps=60, ranks=2, through=SLOW),
    "slow_update": Recorded(
        (*_SFT, "model.path=configs/models/demo_llama"), steps=48, ranks=2, through=SLOW_MODEL
    ),
    "everything_rejected": _ppo(
        f"{_CORRECTION}.rollout_rs=seq_mean_k1",
        f"{_CORRECTION}.rollout_rs_threshold=0.9999999_1.0000001",
        "actor.tp=2",
        steps=4,
        ranks=2,
        through=STALE,
    ),
    "zero_weights": _ppo(
        f"{_CORRECTION}.rollout_is=sequence",
        f"{_CORRECTION}.rollout_is_threshold=0.9999999_1.0000001",
        "actor.tp=2",
        steps=4,
        ranks=2,
        through=STALE,
    ),
}

# None of these raises an alarm.
HEALTHY = {
    "ppo_1": _preset("ppo", seed=1),
    "ppo_2": _preset("ppo", seed=2),
    "demo_3": _ppo(
        "seed=3",
        "data.val_files=runs/demo/data/validation.jsonl",
        "trainer.test_freq=2",
        steps=20,
        ranks=2,
    ),
    "grpo_4": _preset("grpo", "rollout.n=4", seed=4),
    "dr_grpo_5": _preset("dr_grpo", "rollout.n=4", seed=5),
    "rloo_6": _preset("rloo", "rollout.n=4", "actor.ppo_mini_batch_size=64", seed=6),
    "reinforce_plus_plus_7": _preset("reinforce_plus_plus", seed=7),
    "remax_8": _preset("remax", "actor.ppo_mini_batch_size=64", seed=8),
    "cispo_9": _preset("cispo", "rollout.n=4", seed=9),
    "gspo_10": _preset("gspo", "rollout.n=4", seed=10),
    "vapo_11": _preset(
        "vapo", "trainer.critic_warmup=5", "algorithm.lam_length_alpha=1.0", seed=11
    ),
    "sft_12": Recorded((*_SFT, "model.path=configs/models/demo_llama", "seed=12"), steps=40),
}


def record(name: str, recorded: Recorded, work: Path) -> None:
    """Make the run in `work`, and keep its metrics."""
    rewards = work / "rewards.py"
    rewards.write_text(REWARDS, encoding="utf-8")
    through = []
    if recorded.through is not None:
        program = work / f"{name}.py"
        program.write_text(recorded.through, encoding="utf-8")
        through = [str(program)]
    rows = work / "rows.jsonl"
    _write_rows(work / "runs" / "demo" / "data" / "sft.jsonl", rows)

    output = work / "out" / name
    launcher, *rest = [
        argument.replace("REWARDS", str(rewards)).replace("ROWS", str(rows))
        for argument in recorded.arguments
    ]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={recorded.ranks}",
        *through,
        str(ROOT / launcher),
        *(argument.replace("configs/", f"{ROOT}/configs/") for argument in rest),
        f"trainer.total_steps={recorded.steps}",
        f"trainer.output_dir={output}",
        "trainer.overwrite=true",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (work / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    if done.returncode:
        sys.stdout.write(f"{name}: exit code {done.returncode}, see {work / name}.log\n")
        return

    lines = []
    for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kept = {"step": row.pop("step")}
        kept |= {key: _short(value) for key, value in row.items() if key.startswith(KEPT)}
        lines.append(json.dumps(kept) + "\n")
    (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{name}: {len(lines)} steps\n")
    sys.stdout.flush()


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _write_rows(source: Path, target: Path) -> None:
    """Twenty batches of 64 rows; the answers of the sixteenth are all the same nonsense."""
    lines = source.read_text(encoding="utf-8").splitlines()[: 20 * 64]
    rows = [json.loads(line) for line in lines]
    for row in rows[15 * 64 : 16 * 64]:
        row["response"] = "=+=+"
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Make the named recordings, or all."""
    work, *names = sys.argv[1:]
    every = FAILING | HEALTHY
    for name in names or every:
        record(name, every[name], Path(work).resolve())


if __name__ == "__main__":
    main()
