"""The contender "trl" of `grpo_step.py`: TRL's `GRPOTrainer` with peft's adapters, as it is, or its
`DistillationTrainer`.

Its own `train` runs; a callback waits for the word before each step. This file runs in an
environment of its own, in which there is no mrlhf.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from train_step_case import EOS, PAD, Case, read_case
from train_step_turns import Turns
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer
from trl_words import QUIET, STEPS, WordClock, train

RANK = 16
LEARNING_RATE = 2e-4
BETA = 0.02


def main() -> None:
    """Answer the word `step`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=Path)
    parser.add_argument("samples", type=int)
    parser.add_argument("--distil", type=float)
    parser.add_argument("--greedy", action="store_true")
    arguments = parser.parse_args()
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    train(_trainer(read_case(arguments.case), arguments), _Clock(turns))


class _Clock(WordClock):
    """Measures a step."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns)
        self._seconds: dict[str, float] = {}
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """After each step."""
        self._seconds = self.step.read()
        self._steps = state.global_step - self._steps

    def on_log(self, args: Any, state: Any, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """After each step, with its metrics."""
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        tokens = round(float(logs["completions/mean_length"]) * samples)
        steps = self._steps
        self._steps = state.global_step
        self.turns.answer(
            {
                "seconds": self._seconds,
                "tokens": tokens,
                "optimizer_steps": steps,
                "divergence": logs["loss"],  # that is all of it where one distils
            }
        )
        self.wait()


def _trainer(case: Case, arguments: argparse.Namespace) -> GRPOTrainer | DistillationTrainer:
    """The trainer, set as fast as it goes for this work."""
    directory = arguments.case
    response = max(case.response_lengths)
    generation = {"min_new_tokens": response, "suppress_tokens": [PAD, EOS]}
    if arguments.greedy:
        generation["do_sample"] = False
    settings = {
        **QUIET,
        "output_dir": str(directory / "trl"),
        "bf16": False,  # the weights have the dtype already
        "max_steps": STEPS,
        # The whole batch is one micro-batch and one optimizer step.
        "per_device_train_batch_size": len(case.prompts) * arguments.samples,
        "gradient_accumulation_steps": 1,
        "max_completion_length": response,
        "generation_kwargs": generation,
        "temperature": 1.0,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
    }
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer", padding_side="left")
    rows = [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in case.prompts]
    parts = {
        "model": _model(case, directory / "policy"),
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list(rows),
        "peft_config": LoraConfig(
            r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    }
    if arguments.distil is not None:
        config = DistillationConfig(**settings, beta=arguments.distil)
        teacher = _model(case, directory / "teacher")
        return DistillationTrainer(args=config, teacher_model=teacher, **parts)

    config = GRPOConfig(**settings, num_generations=arguments.samples, beta=BETA, loss_type="grpo")
    return GRPOTrainer(args=config, reward_funcs=_distinct, **parts)


def _model(case: Case, directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, case.dtype))


def _distinct(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 40 for text in completions]


if __name__ == "__main__":
    main()
