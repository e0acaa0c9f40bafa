"""The contender "trl" of `grpo_step.py`: TRL's `GRPOTrainer` with peft's adapters, as it is.

Its own `train` runs; a callback waits for the word before each step. This file runs in an
environment of its own, in which there is no mrlhf.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from train_step_case import EOS, PAD, Case, read_case
from train_step_turns import Turns
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_words import QUIET, STEPS, WordClock, train

RANK = 16
LEARNING_RATE = 2e-4
BETA = 0.02


def main() -> None:
    """Answer the word `step`."""
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    directory = Path(sys.argv[1])
    train(_trainer(read_case(directory), directory, int(sys.argv[2])), _Clock(turns))


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
        self.turns.answer({"seconds": self._seconds, "tokens": tokens, "optimizer_steps": steps})
        self.wait()


def _trainer(case: Case, directory: Path, samples: int) -> GRPOTrainer:
    """The trainer, set as fast as it goes for this work."""
    response = max(case.response_lengths)
    settings = GRPOConfig(
        **QUIET,
        output_dir=str(directory / "trl"),
        bf16=False,  # the weights are bfloat16 already
        max_steps=STEPS,
        # The whole batch is one micro-batch and one optimizer step.
        per_device_train_batch_size=len(case.prompts) * samples,
        gradient_accumulation_steps=1,
        num_generations=samples,
        max_completion_length=response,
        generation_kwargs={"min_new_tokens": response, "suppress_tokens": [PAD, EOS]},
        temperature=1.0,
        beta=BETA,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
    )
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer", padding_side="left")
    rows = [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in case.prompts]
    dtype = getattr(torch, case.dtype)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory / "policy", dtype=dtype),
        args=settings,
        processing_class=tokenizer,
        reward_funcs=_distinct,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )


def _distinct(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 40 for text in completions]


if __name__ == "__main__":
    main()
