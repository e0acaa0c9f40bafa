"""A tiny arithmetic task for tests that train: sums of two digits, a few rows of each kind."""

from __future__ import annotations

from pathlib import Path

from mrlhf.data.arithmetic import ArithmeticTask, write_arithmetic
from tests.oracle import plain_models


def write_tiny_task(
    directory: Path,
    *,
    sft: int = 40,
    train: int = 40,
    vocab_size: int = plain_models.SIZES["vocab_size"],
) -> None:
    """Write `sft.jsonl`, `train.jsonl`, `held_out.jsonl` and a tokenizer into `directory`.

    Args:
        directory: is made.
        sft: rows with responses.
        train: prompts.
        vocab_size: of the tokenizer; by default that of the models of `plain_models.save_models`.
    """
    task = ArithmeticTask(
        digits=2,
        operations="+",
        sft=sft,
        train=train,
        validation=4,
        held_out=4,
        wrong_fraction=0.0,
        wrong_kind="near",
        vocab_size=vocab_size,
        seed=1,
    )
    write_arithmetic(directory, task)
