"""A batch of responses together with what it took to generate them.

This file does not know why the batch is generated, nor how responses are scored.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrlhf.batch import Prompts, Rollout
from mrlhf.inference.base import SamplingParams
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.scoring import Scores


@dataclass(frozen=True)
class DrawnBatch:
    """Responses, and what it took to generate them.

    Attributes:
        rollout: the responses.
        scores: their scores, or None if they have not been scored yet.
        generated_tokens: tokens that the policy drew for the batch, in kept and dropped responses.
        engine_metrics: the engine's metrics of each generation, one or more.
        metrics: what dynamic sampling did; empty without it.
    """

    rollout: Rollout
    scores: Scores | None
    generated_tokens: int
    engine_metrics: list[dict[str, float]]
    metrics: dict[str, float]


def generate_batch(
    generator: Generator,
    prompts: Prompts,
    sampling: SamplingParams,
    stream: str,
    step: int,
    refill: int = 0,
) -> DrawnBatch:
    """Responses to `prompts`, not yet scored; arguments as in `Generator.generate`."""
    generated = generator.generate(prompts, sampling, stream=stream, step=step, refill=refill)
    return DrawnBatch(
        rollout=generated.rollout,
        scores=None,
        generated_tokens=int(generated.rollout.loss_mask.sum()),
        engine_metrics=[generated.metrics],
        metrics={},
    )
