"""A tiny arithmetic task for tests that train: sums of two digits, a few rows of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.recipes.data.arithmetic import write_arithmetic
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
    write_arithmetic(
        directory,
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


def data_keys(root: Path, max_response_length: int = 12) -> dict[str, Any]:
    """Keys of the prompts in `root/data`, for PPO."""
    return {
        "train_files": str(root / "data" / "train.jsonl"),
        "tokenizer": str(root / "data" / "tokenizer"),
        "train_batch_size": 8,
        "max_prompt_length": 6,
        "max_response_length": max_response_length,
    }


def ppo_keys(root: Path, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a run of PPO on the task in `root/data`, with models of `plain_models.save_models`.

    `trained` are keys of both models that train. The reward, the method and the length of the run
    are missing.
    """
    return {
        "seed": 3,
        "actor": {"path": str(root / "llama"), "tp": 2, **trained},
        "critic": {"path": str(root / "llama-critic"), **trained},
        "reference": {"path": str(root / "llama-ref")},
        "rollout": {"n": 2},
        "data": {**data_keys(root), "val_files": str(root / "data" / "held_out.jsonl")},
    }


def sft_keys(root: Path, max_length: int) -> dict[str, Any]:
    """Keys of fine-tuning on the task in `root/data`, without the length of the run."""
    return {
        "seed": 3,
        "model": {"path": str(root / "llama")},
        "optim": {"lr": 1e-3},
        "data": {
            "train_files": str(root / "data" / "sft.jsonl"),
            "tokenizer": str(root / "data" / "tokenizer"),
            "batch_size": 8,
            "max_length": max_length,
        },
    }
