"""Collects the batch of one training step: generates responses and scores them.

Where the estimator asks for it, each prompt also gets a greedy response as its baseline. With
dynamic sampling or partial rollouts a `GroupSampler` draws the responses. This file does not know
models or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from torch import Tensor

from mrlhf.batch import Prompts, Rollout
from mrlhf.inference.base import SamplingParams
from mrlhf.metrics.table import row_of
from mrlhf.rollout.generator import SLOWEST, DrawnBatch, Generator
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scorer, Scores

# How to merge a metric of several generations, by its reduction; the others are averaged.
_MERGES: Mapping[str, Callable[[list[float]], float]] = {"max": max, "sum": sum}


@dataclass(frozen=True)
class Collected:
    """A training batch with its scores."""

    rollout: Rollout
    scores: Scores
    # float32 [batch], the shaped score of the greedy response to the row's prompt, or None without
    # a greedy baseline
    greedy_scores: Tensor | None
    # tokens that the policy drew, also in responses that are not in the batch
    generated_tokens: int
    metrics: dict[str, float]  # metrics of generation and of dynamic sampling


class GroupSampler(Protocol):
    """Chooses the prompt groups of a training batch."""

    def draw(self, step: int, sampling: SamplingParams) -> DrawnBatch:
        """The responses of a training step; their scores if it needs them to choose."""
        ...


@dataclass(frozen=True)
class Collector:
    """Fills the batches of training steps; every rank calls each method together."""

    generator: Generator  # holds the current weights when `generate` is called
    scorer: Scorer
    shaper: RewardShaper  # adds penalties to the scores of greedy responses
    prompts: Iterator[Prompts]  # an endless supply of batches of prompts
    sampler: GroupSampler | None  # if given, it draws the responses, from the same supply
    greedy_baseline: bool  # whether each prompt gets a greedy response too

    def generate(self, step: int, sampling: SamplingParams) -> tuple[DrawnBatch, DrawnBatch | None]:
        """Generate the responses of training step `step`; the engine sleeps afterwards.

        With dynamic sampling the responses are scored as well, since scores decide which are kept.

        Returns:
            The responses, and one greedy response to each prompt or None without a greedy baseline.
        """
        enter = self.generator.phases.enter
        if self.sampler is None:
            with enter("gen"):
                drawn = self.generator.generate(next(self.prompts), sampling, "train", step)
        else:
            drawn = self.sampler.draw(step, sampling)

        greedy = None
        if self.greedy_baseline:
            greedy = self._generate_greedy(drawn, sampling, step)
        with enter("gen"):
            self.generator.sleep()
        return drawn, greedy

    def score(self, drawn: DrawnBatch, greedy: DrawnBatch | None) -> Collected:
        """Score the responses of `generate`; dynamic sampling has already scored its own."""
        metrics = dict(drawn.metrics)
        rollout = drawn.rollout
        scores = drawn.scores
        greedy_scores = None
        with self.generator.phases.enter("reward"):
            if scores is None:
                rollout, scores = self.scorer.score(rollout)
            if greedy is not None:
                baseline = self._score_greedy(greedy.rollout)
                greedy_scores = baseline.repeat_interleave(len(drawn.rollout) // len(baseline))
                metrics["critic/greedy_score/mean"] = float(baseline.mean())

        generated = [drawn] if greedy is None else [drawn, greedy]
        engine_metrics = [numbers for batch in generated for numbers in batch.engine_metrics]
        return Collected(
            rollout=rollout,
            scores=scores,
            greedy_scores=greedy_scores,
            generated_tokens=sum(batch.generated_tokens for batch in generated),
            metrics=metrics | merge_engine_metrics(engine_metrics),
        )

    def _generate_greedy(
        self, drawn: DrawnBatch, sampling: SamplingParams, step: int
    ) -> DrawnBatch:
        """One greedy response to each prompt of `drawn`."""
        enter = self.generator.phases.enter
        was_put_to_sleep = drawn.scores is not None and self.scorer.has_model
        if was_put_to_sleep:
            with enter("reshard"):
                self.generator.take_weights(version=self.generator.version)

        first_samples = range(0, len(drawn.rollout), sampling.n)
        prompts = drawn.rollout.prompts.select(first_samples)
        with enter("gen"):
            return self.generator.generate(prompts, sampling.greedy(), "greedy baseline", step)

    def _score_greedy(self, rollout: Rollout) -> Tensor:
        """Shaped score of each greedy response, float32 [prompts]."""
        rollout, scores = self.scorer.score(rollout)
        return rollout.with_turn_rewards(self.shaper.shape_each(scores.total, rollout))


def merge_engine_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The engine's metrics over several generations, at least one.

    The table of metrics says of which to take the sum or the maximum; all others are averaged. The
    slowest replica is taken from the generation in which one was slowest.
    """
    furthest = max(parts, key=lambda part: part.get(SLOWEST, 0.0))
    merged = {name: value for name, value in furthest.items() if name.startswith(SLOWEST)}

    for name in (name for name in parts[0] if not name.startswith(SLOWEST)):
        column = [part[name] for part in parts]
        merge = _MERGES.get(row_of(name).how, fmean)
        merged[name] = merge(column)
    return merged
