"""Has a trainer of TRL wait for a word before each step, and answer after it.

Its own `train` runs; a callback waits. This file runs where there is no mrlhf.
"""

from __future__ import annotations

from typing import Any

from train_step_turns import Stopwatch, Turns
from transformers import TrainerCallback

STEPS = 100_000  # more than anyone asks for
# Arguments of every trainer, so that it does nothing but steps.
QUIET = {
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "gradient_checkpointing": False,
}


class WordClock(TrainerCallback):  # type: ignore[misc]
    """Waits for the next word, and measures from there."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.step = Stopwatch()
        self._words = iter(turns)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Before the first step."""
        self.wait()

    def wait(self) -> None:
        """Wait for the word of the next step."""
        if next(self._words, None) is None:
            raise _NoMoreWords
        self.step = Stopwatch()


def train(trainer: Any, clock: WordClock) -> None:
    """Say that all is ready, and train until there are no more words."""
    trainer.add_callback(clock)
    clock.turns.answer({})
    try:
        trainer.train()
    except _NoMoreWords:
        return


class _NoMoreWords(Exception):
    """Ends the trainer's loop."""
