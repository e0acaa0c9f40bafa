"""The rows of results of `train_step.py` and their tables. It measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from train_step_case import EPOCHS, Case

from mrlhf.models.flops import forward_flops, training_flops
from mrlhf.models.spec import ModelSpec

HEADS = (
    "model",
    "dtype",
    "lengths",
    "case",
    "contender",
    "layout",
    "ranks x threads",
    "seconds",
    "tokens/s",
    "of GEMM limit",
    "x plain",
    "x TRL",
)


def needed_operations(case: Case, spec: ModelSpec, critic: ModelSpec) -> dict[str, float]:
    """Floating-point operations that an update and a whole step need, whoever does the work.

    A step needs each token once through the policy, which generates, the reference, the critic and
    the reward model, and the update. That ours computes the policy's log-probs once more than that
    does not count.
    """
    sequences = case.sequences
    trained = training_flops(spec, sequences) + training_flops(critic, sequences)
    evaluated = 0.0
    for length, response in sequences:
        evaluated += 2 * forward_flops(spec, length, response)  # policy and reference
        evaluated += forward_flops(critic, length, response)
        evaluated += forward_flops(critic, length, 1)  # the reward model
    return {"update": EPOCHS * trained, "step": EPOCHS * trained + evaluated}


def product_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Inputs and outputs of the model's products."""
    q_rows = spec.num_heads * spec.head_dim
    kv_rows = spec.num_kv_heads * spec.head_dim
    return [
        (spec.hidden_size, q_rows + 2 * kv_rows),
        (q_rows, spec.hidden_size),
        (spec.hidden_size, 2 * spec.ffn_size),
        (spec.ffn_size, spec.hidden_size),
        (spec.hidden_size, spec.vocab_size),
    ]


def limit_of(rounds: Sequence[Sequence[Sequence[float]]], share_of_cores: float) -> float:
    """Operations a second of the fastest of the model's products, on all ranks at once.

    Args:
        rounds: the speed of each product on each rank, measured several times.
        share_of_cores: what each rank has of the cores that its threads would use.
    """
    sums = [sum(speeds) for ranks in rounds for speeds in zip(*ranks, strict=True)]
    return max(sums) * share_of_cores


def summary(
    seconds: Sequence[float], tokens: int, operations: float, limit: float
) -> dict[str, float]:
    """The figures of a row that follow from its measurements."""
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "tokens_per_s": tokens / median,
        "share_of_gemm_limit": operations / median / limit,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as lines of a table."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for row in rows:
        cells = [str(row[name]) for name in ("size", "dtype", "lengths", "case")]
        cells += [row["contender"], row["layout"], f"{row['ranks']} x {row['threads']}"]
        cells += [
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['share_of_gemm_limit']:.0%}",
        ]
        for other in ("plain", "trl"):
            seconds = _seconds_of(other, row, rows)
            cells.append("" if seconds is None else f"{seconds / row['seconds']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _seconds_of(
    name: str, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> float | None:
    """The seconds of the contender `name` for the same work in the same run."""
    for other in rows:
        if other["contender"] == name and all(other[key] == row[key] for key in ("run", "case")):
            return float(other["seconds"])
    return None
