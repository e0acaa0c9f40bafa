"""One rank of the contender "trl" of `episodes.py`: TRL's `GRPOTrainer` with `environment_factory`.

Its own `train` runs. A callback waits for the word before each step, and measures from the word to
the end of the step. This file runs in an environment of its own, in which there is no mrlhf.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from episodes_game import TURNS, TrlGame
from train_step_turns import Stopwatch, Turns
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_words import QUIET, STEPS, WordClock, train

# As TRL has it for Qwen3; the template of the case writes calls in this form.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}


def main() -> None:
    """Answer the word `step`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--max-response", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--continuous-batching", action="store_true")
    arguments = parser.parse_args()

    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer = _trainer(arguments)
    train(trainer, _Clock(turns, trainer))


class _Counting(GRPOTrainer):  # type: ignore[misc]
    """The trainer, which counts the tokens and the seconds of a batch's episodes."""

    tokens = 0
    generation_s = 0.0

    def _generate(self, prompts: list[Any]) -> Any:
        watch = Stopwatch()
        generated = super()._generate(prompts)
        self.generation_s = watch.read()["clock"]
        lengths = torch.tensor([float(sum(map(len, generated[1])))])
        self.tokens = int(self.accelerator.reduce(lengths, reduction="sum"))
        return generated


class _Clock(WordClock):
    """Answers with the facts of a step."""

    def __init__(self, turns: Turns, trainer: _Counting) -> None:
        super().__init__(turns)
        self._trainer = trainer
        self._seconds: dict[str, float] = {}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After each step."""
        self._seconds = self.step.read()

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """After each step, with its metrics."""
        trainer = self._trainer
        episodes = trainer.args.per_device_train_batch_size * trainer.accelerator.num_processes
        answer = {
            "seconds": self._seconds,
            "reward": logs["reward"],
            "calls": logs["tools/call_frequency"] * episodes,
            "tokens": trainer.tokens,
            "phases": {"gen": trainer.generation_s},
        }
        self.turns.answer(answer)
        self.wait()


def _trainer(arguments: argparse.Namespace) -> _Counting:
    """The trainer, set as fast as it goes for this work."""
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    ranks = int(os.environ["WORLD_SIZE"])
    settings = GRPOConfig(
        **QUIET,
        output_dir=str(arguments.case / "trl"),
        ddp_backend="gloo" if ranks > 1 else None,
        ddp_find_unused_parameters=False if ranks > 1 else None,
        bf16=False,
        max_steps=STEPS,
        # The whole batch is one micro-batch and one optimizer step.
        per_device_train_batch_size=len(rows) * arguments.samples // ranks,
        gradient_accumulation_steps=1,
        num_generations=arguments.samples,
        max_completion_length=arguments.max_response,
        max_tool_calling_iterations=TURNS,
        shuffle_dataset=False,
        use_transformers_continuous_batching=arguments.continuous_batching,
        beta=0.0,
        loss_type="grpo",
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.case / "tokenizer", padding_side="left")
    tokenizer.response_template = RESPONSE_TEMPLATE
    return _Counting(
        model=AutoModelForCausalLM.from_pretrained(arguments.case / "policy", dtype=torch.float32),
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        environment_factory=TrlGame,
    )


if __name__ == "__main__":
    main()
