"""Tiny models, data and configurations for jobs of two ranks, and what their runs leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mrlhf.data.arithmetic import ArithmeticTask, write_arithmetic
from tests import plain_ppo
from tests.e2e.programs import read_lines

# What no two runs have alike: times, and what follows from them or from where a run was interrupted.
FREE = ("timing", "perf/", "reshard/seconds", "rollout/")


def write_inputs(root: Path) -> None:
    """Write models, data, `ppo.yaml` and `sft.yaml` into `root`."""
    plain_ppo.save_models(root)
    task = ArithmeticTask(
        digits=2,
        operations="+",
        sft=40,
        train=40,
        held_out=4,
        wrong_fraction=0.0,
        wrong_kind="near",
        vocab_size=plain_ppo.SIZES["vocab_size"],
        seed=1,
    )
    write_arithmetic(root / "data", task)
    (root / "ppo.yaml").write_text(yaml.safe_dump(_ppo(root)), encoding="utf-8")
    (root / "sft.yaml").write_text(yaml.safe_dump(_sft(root)), encoding="utf-8")


def records(output: Path) -> list[dict[str, Any]]:
    """The metrics of each step that must be the same in each run."""
    kept = []
    for record in read_lines(output / "metrics.jsonl"):
        kept.append({name: value for name, value in record.items() if not name.startswith(FREE)})
    return kept


def _ppo(root: Path) -> dict[str, Any]:
    trained = {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}}
    kl_ctrl = {"type": "adaptive", "kl_coef": 0.2, "target_kl": 1e-4, "horizon": 100}
    return {
        "seed": 3,
        "actor": {"path": str(root / "llama"), "tp": 2, **trained},
        "critic": {"path": str(root / "llama-critic"), **trained},
        "reference": {"path": str(root / "llama-ref")},
        "reward": {"terms": [{"name": "exact_match"}]},
        "rollout": {"n": 2, "tp": 1},
        "data": {
            "train_files": str(root / "data" / "train.jsonl"),
            "val_files": str(root / "data" / "held_out.jsonl"),
            "tokenizer": str(root / "data" / "tokenizer"),
            "train_batch_size": 8,
            "max_prompt_length": 6,
            "max_response_length": 12,
        },
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": kl_ctrl},
        "trainer": {"total_steps": 4, "output_dir": "set by the job"},
        "distributed": {"timeout_s": 120.0},
    }


def _sft(root: Path) -> dict[str, Any]:
    return {
        "seed": 3,
        "model": {"path": str(root / "llama")},
        "optim": {"lr": 1e-3},
        "data": {
            "train_files": str(root / "data" / "sft.jsonl"),
            "tokenizer": str(root / "data" / "tokenizer"),
            "batch_size": 8,
            "max_length": 12,
        },
        "trainer": {"total_steps": 2, "output_dir": "set by the job"},
        "distributed": {"timeout_s": 120.0},
    }
