"""Collects the responses of one training step: generate, score, and, in dynamic sampling, refill.

Groups whose responses all got the same reward teach a group-relative estimator nothing; with
`algorithm.filter_groups` they are replaced by groups of further prompts (DAPO,
https://arxiv.org/abs/2503.14476, section 3.2). It knows neither models nor losses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.algorithm import FilterGroupsSection
from mrlhf.errors import ConfigError
from mrlhf.inference.base import SamplingParams
from mrlhf.metrics import PhaseTimer
from mrlhf.rollout.generator import Generated, Generator
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scorer, Scores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """A training batch, scored.

    Attributes:
        rollout: the responses.
        scores: of each response.
        greedy_scores: float32 [batch], the shaped score of the greedy response to the row's prompt,
            or None.
        generated_tokens: of all responses that were generated for the batch.
        metrics: of generation and refilling.
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
        scorer: of responses.
        shaper: knows the penalties that come on top of scores.
        prompts: an endless supply of batches of prompts.
        train_batch_size: prompts of a training step.
        filters: dynamic sampling.
        greedy_baseline: whether each prompt gets a greedy response too.
    """

    generator: Generator
    scorer: Scorer
    shaper: RewardShaper
    prompts: Iterator[Prompts]
    train_batch_size: int
    filters: FilterGroupsSection
    greedy_baseline: bool

    def collect(self, step: int, sampling: SamplingParams, timer: PhaseTimer) -> Collected:
        """Generate and score the batch of training step `step`; the engine sleeps afterwards."""
        drawn = _Drawn()
        if self.filters.enable:
            rollout, scores = self._refill(step, sampling, timer, drawn)
        else:
            with timer("gen"):
                generated = self.generator.generate(
                    next(self.prompts), sampling, stream="train", step=step
                )
            drawn.take(generated)
            rollout = generated.rollout
            scores = None
        greedy = None
        with timer("gen"):
            if self.greedy_baseline:
                generated = self.generator.generate(
                    rollout.prompts.select(range(0, len(rollout), sampling.n)),
                    replace(sampling, n=1, temperature=0.0, top_k=-1, top_p=1.0),
                    stream="greedy baseline",
                    step=step,
                )
                drawn.take(generated)
                greedy = generated.rollout
            self.generator.sleep()
        greedy_scores = None
        with timer("reward"):
            if scores is None:
                scores = self.scorer.score(rollout)
            if greedy is not None:
                baseline = self.shaper.shape_alone(self.scorer.score(greedy).total, greedy)
                greedy_scores = baseline.repeat_interleave(sampling.n)
                drawn.metrics["critic/greedy_score/mean"] = float(baseline.mean())
        return Collected(rollout, scores, greedy_scores, drawn.tokens, drawn.summary())

    def _refill(
        self, step: int, sampling: SamplingParams, timer: PhaseTimer, drawn: _Drawn
    ) -> tuple[Rollout, Scores]:
        """Generate batches until enough groups have different rewards, or the limit of batches is
        reached.
        """
        rollouts: list[Rollout] = []
        scored: list[Scores] = []
        differs: list[bool] = []
        while (
            sum(differs) < self.train_batch_size
            and len(rollouts) < self.filters.max_num_gen_batches
        ):
            prompts = next(self.prompts)
            if rollouts and self.scorer.has_model:
                with timer("reshard"):
                    self.generator.take_weights(version=rollouts[0].version)
            with timer("gen"):
                generated = self.generator.generate(
                    prompts, sampling, stream="train", step=step, refill=len(rollouts)
                )
                if self.scorer.has_model:
                    self.generator.sleep()  # the reward model needs the memory
            drawn.take(generated)
            rollout = generated.rollout
            with timer("reward"):
                scored.append(self.scorer.score(rollout))
            rollouts.append(rollout)
            differs += groups_that_differ(self._measure(rollout, scored[-1]), sampling.n)
        if self.filters.metric == "acc" and all(scores.correct is None for scores in scored):
            raise ConfigError(
                "algorithm.filter_groups.metric is acc, but no reward term tells right from wrong; use a rule that "
                "does (exact_match, gsm8k), let your function return 'acc', or set the metric to score"
            )
        if self.greedy_baseline and self.scorer.has_model:
            with timer("reshard"):
                self.generator.take_weights(version=rollouts[0].version)
        groups = choose_groups(differs, self.train_batch_size)
        rows = [group * sampling.n + sample for group in groups for sample in range(sampling.n)]
        uninformative = sum(not differs[group] for group in groups)
        if uninformative:
            logger.warning(
                "step %d: %d of %d groups have equal rewards after %d batches (algorithm.filter_groups."
                "max_num_gen_batches); they stay in the batch and teach nothing",
                step, uninformative, len(groups), len(rollouts),
            )  # fmt: skip
        drawn.metrics |= {
            "training/num_gen_batches": float(len(rollouts)),
            "training/generated_groups": float(len(differs)),
            "training/filtered_groups": float(len(differs) - sum(differs) - uninformative),
            "training/uninformative_groups": float(uninformative),
        }
        return Rollout.join(rollouts).select(rows), Scores.join(scored).select(rows)

    def _measure(self, rollout: Rollout, scores: Scores) -> Tensor:
        """[batch], the number in which the responses of a group have to differ."""
        if self.filters.metric == "acc":
            return torch.tensor(scores.correct or [math.nan] * len(rollout), dtype=torch.float32)
        if self.filters.metric == "seq_reward":
            return self.shaper.shape_alone(scores.total, rollout)
        return scores.total


@dataclass
class _Drawn:
    """What was generated for one training step, over all its batches.

    Attributes:
        tokens: of the responses.
        metrics: other numbers of the step.
        engine: the engine's metrics of each batch.
    """

    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    engine: list[dict[str, float]] = field(default_factory=list)

    def take(self, generated: Generated) -> None:
        """Count one batch."""
        self.tokens += int(generated.rollout.response_mask.sum())
        self.engine.append(generated.metrics)

    def summary(self) -> dict[str, float]:
        """All metrics; of the engine's, bytes are the most of any batch, preemptions their sum, the
        rest their mean.
        """
        found = dict(self.metrics)
        for name in self.engine[0]:
            column = [metrics[name] for metrics in self.engine]
            if name.endswith("_bytes"):
                found[name] = max(column)
            else:
                found[name] = sum(column) if name == "rollout/preemptions" else fmean(column)
        return found


def groups_that_differ(values: Tensor, n: int) -> list[bool]:
    """Whether the `n` consecutive values of each group are not all the same; `values` is [groups *
    n].

    NaN stands for no value; a group with fewer than two values does not differ.
    """
    groups = values.view(-1, n)
    highest, lowest = (
        groups.nan_to_num(nan=-math.inf).amax(dim=1),
        groups.nan_to_num(nan=math.inf).amin(dim=1),
    )
    return (highest > lowest).tolist()


def choose_groups(differs: list[bool], count: int) -> list[int]:
    """`count` groups in the order they came: the first that differ and, where those are too few,
    the first others.
    """
    chosen = [group for group, does in enumerate(differs) if does][:count]
    others = [group for group, does in enumerate(differs) if not does]
    return sorted(chosen + others[: count - len(chosen)])
