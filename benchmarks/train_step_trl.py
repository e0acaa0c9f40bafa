"""The contender "trl" of `train_step.py`: the PPO trainer of `trl.experimental.ppo`, as it is.

Its own `train` runs. A callback waits for the word before each step, and measures from the word to
the end of the step. The update begins where the trainer first calls policy and critic together.
This file runs in an environment of its own, in which there is no mrlhf.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from train_step_case import (
    EOS,
    EPOCHS,
    KL_COEF,
    LAMBDA,
    LEARNING_RATE,
    MINI_BATCHES,
    PAD,
    Case,
    read_case,
)
from train_step_turns import Stopwatch, Turns
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl_words import QUIET, STEPS, WordClock, train


def main() -> None:
    """Answer the word `step`."""
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    directory = Path(sys.argv[1])
    trainer = _trainer(read_case(directory), directory)
    clock = _Clock(turns)
    trainer.model.register_forward_pre_hook(clock.at_update)
    train(trainer, clock)


class _Clock(WordClock):
    """Measures a step and its update."""

    _update: Stopwatch | None = None

    def at_update(self, *_: Any) -> None:
        """Policy and critic are called together, which only the update does."""
        if self._update is None:
            self._update = Stopwatch()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After each step."""
        assert self._update is not None
        seconds = {"step": self.step.read(), "update": self._update.read()}
        self.turns.answer({"seconds": seconds})
        self._update = None
        self.wait()


class _ForcedEnds(LogitsProcessor):  # type: ignore[misc]
    """Ends each response after as many tokens as the case says, and nowhere else."""

    def __init__(self, case: Case) -> None:
        pairs = zip(case.prompts, case.response_lengths, strict=True)
        self._lengths = {tuple(prompt): length for prompt, length in pairs}
        self._width = max(case.prompt_lengths)
        self._ends = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = input_ids.shape[1] - self._width
        if drawn == 0:
            self._ends = torch.tensor([self._length(row) for row in input_ids.tolist()])

        scores[:, [PAD, EOS]] = float("-inf")
        ending = (self._ends == drawn + 1).nonzero()[:, 0]
        scores[ending] = float("-inf")
        scores[ending, EOS] = 0.0
        return scores

    def _length(self, row: list[int]) -> int:
        # TRL puts zeros where a prompt is padded, on its left.
        first = next(place for place, token in enumerate(row) if token)
        return self._lengths[tuple(row[first:])]


def _trainer(case: Case, directory: Path) -> PPOTrainer:
    """The trainer, set as fast as it goes for this work; rank 0 trains the policy whole."""
    batch = len(case.prompts)
    settings = PPOConfig(
        **QUIET,
        output_dir=str(directory / "trl"),
        bf16=case.dtype == "bfloat16",  # float32 weights, products in bfloat16; TRL's default
        num_sample_generations=0,
        # With gradient_accumulation_steps 1, each mini-batch is one micro-batch and one optimizer
        # step. With more, TRL would take an optimizer step only at the end of the batch.
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=batch,
        num_mini_batches=MINI_BATCHES,
        num_ppo_epochs=EPOCHS,
        total_episodes=batch * STEPS,
        response_length=max(case.response_lengths),
        stop_token="eos",
        temperature=1.0,
        kl_coef=KL_COEF,
        lam=LAMBDA,
        learning_rate=LEARNING_RATE,
    )

    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer", padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(directory / "policy")
    policy.generation_config.pad_token_id = PAD
    ends = LogitsProcessorList([_ForcedEnds(case)])
    policy.generate = functools.partial(policy.generate, logits_processor=ends)
    return PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(directory / "policy"),
        reward_model=AutoModelForSequenceClassification.from_pretrained(directory / "reward"),
        value_model=AutoModelForSequenceClassification.from_pretrained(directory / "critic"),
        train_dataset=Dataset.from_list([{"input_ids": prompt} for prompt in case.prompts]),
    )


if __name__ == "__main__":
    main()
