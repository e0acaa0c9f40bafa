"""Collects the batch of one training step: generates responses and scores them.

Where the estimator asks for it, each prompt also gets a greedy response as its baseline. With
dynamic sampling a `DynamicSampler` draws the responses. This file does not know models or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch import Tensor

from mrlhf.batch import Prompts, Rollout
from mrlhf.inference.base import SamplingParams
from mrlhf.metrics import PhaseTimer
from mrlhf.rollout.drawn_batch import DrawnBatch, generate_batch
from mrlhf.rollout.dynamic_sampling import DynamicSampler
from mrlhf.rollout.generator import SLOWEST, Generator
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scorer, Scores


@dataclass(frozen=True)
class Collected:
    """A training batch with its scores.

    Attributes:
        rollout: the responses.
        scores: the score of each response.
        greedy_scores: float32 [batch], the shaped score of the greedy response to the row's prompt,
            or None without a greedy baseline.
        generated_tokens: tokens that the policy drew for the batch, in all responses that were
            generated, whether they are in the batch or not.
        metrics: metrics of generation and of dynamic sampling.
    """

    rollout: Rollout
    scores: Scores
    greedy_scores: Tensor | None
    generated_tokens: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Collector:
    """Fills the batches of training steps; every rank calls it in step.

    Attributes:
        generator: holds the current weights when `collect` is called.
        scorer: scores responses.
        shaper: adds penalties to the scores of greedy responses.
        prompts: an endless supply of batches of prompts.
        dynamic_sampler: draws the responses instead, from the same supply, or None.
        greedy_baseline: whether each prompt gets a greedy response too.
    """

    generator: Generator
    scorer: Scorer
    shaper: RewardShaper
    prompts: Iterator[Prompts]
    dynamic_sampler: DynamicSampler | None
    greedy_baseline: bool

    def collect(self, step: int, sampling: SamplingParams, timer: PhaseTimer) -> Collected:
        """Generate and score the batch of training step `step`; the engine sleeps afterwards."""
        if self.dynamic_sampler is None:
            with timer("gen"):
                drawn = generate_batch(self.generator, next(self.prompts), sampling, "train", step)
        else:
            drawn = self.dynamic_sampler.draw(step, sampling, timer)

        generated = [drawn]
        if self.greedy_baseline:
            generated.append(self._generate_greedy(drawn, sampling, step, timer))
        with timer("gen"):
            self.generator.sleep()

        metrics = dict(drawn.metrics)
        scores = drawn.scores
        greedy_scores = None
        with timer("reward"):
            if scores is None:
                scores = self.scorer.score(drawn.rollout)
            if self.greedy_baseline:
                baseline = self._score_greedy(generated[-1].rollout)
                greedy_scores = baseline.repeat_interleave(sampling.n)
                metrics["critic/greedy_score/mean"] = float(baseline.mean())

        engine_metrics = [numbers for batch in generated for numbers in batch.engine_metrics]
        return Collected(
            rollout=drawn.rollout,
            scores=scores,
            greedy_scores=greedy_scores,
            generated_tokens=sum(batch.generated_tokens for batch in generated),
            metrics=metrics | merge_engine_metrics(engine_metrics),
        )

    def _generate_greedy(
        self, drawn: DrawnBatch, sampling: SamplingParams, step: int, timer: PhaseTimer
    ) -> DrawnBatch:
        """One greedy response to each prompt of `drawn`."""
        was_put_to_sleep = drawn.scores is not None and self.scorer.has_model
        if was_put_to_sleep:
            with timer("reshard"):
                self.generator.take_weights(version=self.generator.version)

        first_samples = range(0, len(drawn.rollout), sampling.n)
        prompts = drawn.rollout.prompts.select(first_samples)
        greedy = replace(sampling, n=1, temperature=0.0, top_k=-1, top_p=1.0, record_experts=False)
        with timer("gen"):
            return generate_batch(self.generator, prompts, greedy, "greedy baseline", step)

    def _score_greedy(self, rollout: Rollout) -> Tensor:
        """Shaped score of each greedy response, float32 [prompts]."""
        return self.shaper.shape_each(self.scorer.score(rollout).total, rollout)


def merge_engine_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The engine's metrics over several generations, at least one.

    Bytes are the most of any generation, preemptions their sum, and everything else is the mean;
    the slowest replica is that of the generation in which one stayed behind most.
    """
    furthest = max(parts, key=lambda part: part.get(SLOWEST, 0.0))
    merged = {name: value for name, value in furthest.items() if name.startswith(SLOWEST)}

    for name in (name for name in parts[0] if not name.startswith(SLOWEST)):
        column = [part[name] for part in parts]
        if name.endswith("_bytes"):
            merged[name] = max(column)
        elif name == "rollout/preemptions":
            merged[name] = sum(column)
        else:
            merged[name] = fmean(column)
    return merged
