"""One rank of the contender "ours" of `grpo_step.py`: whole steps of the trainer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist
from own_trainer import leave, make_trainer, phases_of
from train_step_case import Case, read_case
from train_step_ours import force_lengths
from train_step_turns import Stopwatch, Turns

from mrlhf.trainers.ppo.resume import Updating

RANK = 16
LEARNING_RATE = 2e-4
BETA = 0.02
REWARD = """
def distinct(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str.split())) / 40
"""


def main() -> None:
    """Answer the word `step`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=Path)
    parser.add_argument("samples", type=int)
    parser.add_argument("--distil", type=float)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    turns = Turns()
    case = read_case(arguments.case)
    (arguments.case / "reward.py").write_text(REWARD)
    keys = _keys(case, arguments.case, arguments.samples)
    if arguments.distil is not None:
        _distil(keys, arguments.case / "teacher", arguments.distil)
    trainer = make_trainer(keys, arguments.set, arguments.case)
    sampling = {"temperature": 0.0} if arguments.greedy else {}
    force_lengths(trainer.parts.generator.engine, case.response_lengths, **sampling)
    turns.answer({})

    for number, _ in enumerate(turns, start=1):
        dist.barrier()
        watch = Stopwatch()
        metrics = trainer.step(trainer.begin_step(number))
        assert isinstance(trainer.state, Updating)
        turns.answer(
            {
                "seconds": watch.read(),
                "phases": phases_of(metrics),
                "tokens": sum(trainer.state.collected.rollout.response_lengths),
                "optimizer_steps": metrics["actor/optimizer_steps"],
                "divergence": metrics.get("actor/distillation_kl"),
            }
        )
    leave()


def _keys(case: Case, directory: Path, samples: int) -> dict[str, Any]:
    return {
        "seed": 1,
        "actor": {
            "path": str(directory / "policy"),
            "dtype": case.dtype,
            "lora": {"rank": RANK},
            "share_prompts": True,
            "ppo_mini_batch_size": len(case.prompts),
            "use_kl_loss": True,
            "kl_loss_coef": BETA,
            "optim": {"lr": LEARNING_RATE},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {"terms": [{"name": f"{directory / 'reward.py'}:distinct"}]},
        "rollout": {"n": samples, "kv_cache_mb": 512},
        "data": {
            "train_files": str(directory / "train.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "train_batch_size": len(case.prompts),
            "max_prompt_length": max(case.prompt_lengths),
            "max_response_length": max(case.response_lengths),
            "shuffle": False,
        },
        "trainer": {"total_steps": 1000, "output_dir": str(directory / "run"), "log_samples": 0},
    }


def _distil(keys: dict[str, Any], teacher: Path, beta: float) -> None:
    """Have a teacher teach in the place of the reward; `beta` is TRL's."""
    divergence: dict[str, Any] = {"kl": {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")}
    if divergence["kl"] == "jsd":
        divergence["beta"] = beta
    keys["algorithm"] = {"preset": "flash_reinforce", "distillation": divergence}
    keys["teacher"] = {"path": str(teacher), "dtype": keys["actor"]["dtype"]}
    keys["reward"]["terms"][0]["weight"] = 0
    keys["actor"]["loss_agg_mode"] = "token-mean"
    for key in ("use_kl_loss", "kl_loss_coef"):
        del keys["actor"][key]


if __name__ == "__main__":
    main()
