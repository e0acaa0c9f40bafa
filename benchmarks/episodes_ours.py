"""One rank of the contender "ours" of `episodes.py`: the trainer of `launch/train_ppo.py` as GRPO.

It calls whole steps of the trainer, and nothing below them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist
from episodes_case import LEARNING_RATE, MAX_RESPONSE, SAMPLES
from episodes_game import TURNS
from own_trainer import leave, make_trainer, phases_of
from train_step_turns import Stopwatch, Turns

GAME = Path(__file__).with_name("episodes_game.py")


def main() -> None:
    """Answer the word `step`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()

    turns = Turns()
    keys = _keys(arguments.case, arguments.prompts)
    trainer = make_trainer(keys, arguments.set, arguments.case)
    episodes = SAMPLES * len(arguments.prompts.read_text().splitlines())
    turns.answer({})

    for number, _ in enumerate(turns, start=1):
        dist.barrier()
        watch = Stopwatch()
        metrics = trainer.step(trainer.begin_step(number))
        turns.answer({"seconds": watch.read(), **_facts(metrics, episodes)})
    leave()


def _facts(metrics: dict[str, float], episodes: int) -> dict[str, Any]:
    """What a step did, of all ranks."""
    return {
        "reward": metrics["critic/score/mean"],
        "calls": metrics["episodes/tool_calls/mean"] * episodes,
        "tokens": metrics["response_length/mean"] * episodes,
        "phases": phases_of(metrics),
    }


def _keys(case: Path, prompts: Path) -> dict[str, Any]:
    """GRPO with one optimizer step a batch, as `episodes_trl.py` has it."""
    count = len(prompts.read_text().splitlines())
    return {
        "seed": 1,
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {
            "path": str(case / "policy"),
            "loss_agg_mode": "seq-mean-token-mean",
            "ppo_mini_batch_size": count,
            "optim": {"lr": LEARNING_RATE, "weight_decay": 0.0},
        },
        "reward": {"terms": [{"name": "environment"}]},
        "rollout": {
            "n": SAMPLES,
            "environment": f"{GAME}:OursGame",
            "max_turns": TURNS + 1,  # the last has no room for an answer
            "on_parse_error": "end",
            "kv_cache_mb": 512,
        },
        "data": {
            "train_files": str(prompts),
            "tokenizer": str(case / "tokenizer"),
            "train_batch_size": count,
            "max_prompt_length": 64,
            "max_response_length": MAX_RESPONSE,
            "shuffle": False,
        },
        "trainer": {
            "total_steps": 100_000,
            "output_dir": str(case / "run"),
            "log_samples": 0,
        },
    }


if __name__ == "__main__":
    main()
