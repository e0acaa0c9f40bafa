"""A batch of responses, with the number of tokens and the engine's metrics of its generation.

This file does not know why the batch is generated, nor how responses are scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mrlhf.batch import Rollout
from mrlhf.rollout.scoring import Scores


@dataclass(frozen=True)
class DrawnBatch:
    """Responses, and what it took to generate them; the same on every rank."""

    rollout: Rollout
    # tokens that the policy drew for the batch, in kept and dropped responses
    generated_tokens: int
    engine_metrics: list[dict[str, float]]  # the engine's metrics of each generation, one or more
    scores: Scores | None = None  # None if they have not been scored yet
    # the metrics of dynamic sampling; empty without it
    metrics: dict[str, float] = field(default_factory=dict)
