"""Measures the policy on held-out prompts: mean reward and accuracy of each data set."""

from __future__ import annotations

from dataclasses import replace

from mrlhf.batch import Prompts
from mrlhf.inference.base import SamplingParams
from mrlhf.trainers.generation import Generator
from mrlhf.trainers.scoring import Scorer


def evaluate(generator: Generator, scorer: Scorer, prompts: Prompts, sampling: SamplingParams) -> dict[str, float]:
    """One response a prompt, scored; every rank calls it, the engine being awake.

    Returns:
        `<data_source>/reward_mean`, and `<data_source>/acc@1` where a reward term tells right from wrong.
    """
    rollout = generator.generate(prompts, replace(sampling, n=1), stream="validation")
    scores = scorer.score(rollout)
    rows_of: dict[str, list[int]] = {}
    for row, source in enumerate(prompts.data_source):
        rows_of.setdefault(source, []).append(row)
    metrics = {}
    for source, rows in rows_of.items():
        metrics[f"{source}/reward_mean"] = float(scores.total[rows].mean())
        if scores.correct is not None:
            metrics[f"{source}/acc@1"] = sum(scores.correct[row] for row in rows) / len(rows)
    return metrics
