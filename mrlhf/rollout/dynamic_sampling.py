"""Dynamic sampling: replaces prompts whose responses all got the same reward by further prompts.

Equal rewards teach nothing to an estimator that compares the responses to one prompt (DAPO,
https://arxiv.org/abs/2503.14476, section 3.2). This file does not know models or losses, nor what
else belongs to a training batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.algorithm import FilterGroupsSection
from mrlhf.inference.base import SamplingParams
from mrlhf.rollout.generator import DrawnBatch, Generator
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.reward_units import RewardUnits
from mrlhf.rollout.score_checks import check_correctness
from mrlhf.rollout.scoring import Scorer, Scores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DynamicSampler:
    """Draws training batches in which the responses to each prompt differ.

    Every rank calls it at the same time.
    """

    generator: Generator  # holds the current weights when `draw` is called
    scorer: Scorer
    shaper: RewardShaper  # adds the penalties for the metric `seq_reward`
    prompts: Iterator[Prompts]  # an endless supply of batches of prompts
    train_batch_size: int  # prompts of a training batch
    # which number has to differ, and how many batches may be generated
    filters: FilterGroupsSection

    def draw(self, step: int, sampling: SamplingParams) -> DrawnBatch:
        """Generate and score batches until enough prompt groups differ in their rewards.

        It stops at `filters.max_num_gen_batches` batches and fills up with prompt groups that do
        not differ. If scoring runs a model, the engine sleeps afterwards.

        Raises:
            ConfigError: the filter compares accuracy, but no reward term reports it.
        """
        batches: list[DrawnBatch] = []
        scores: list[Scores] = []
        differs: list[bool] = []
        while (
            sum(differs) < self.train_batch_size and len(batches) < self.filters.max_num_gen_batches
        ):
            if batches and self.scorer.has_model:
                with self.generator.phases.enter("reshard"):
                    self.generator.take_weights(version=self.generator.version)

            batch, batch_scores = self._draw_one_batch(step, len(batches), sampling)
            batches.append(batch)
            scores.append(batch_scores)
            self._check_accuracy_is_known(scores)

            differs += self._differ(batch.rollout, batch_scores, sampling.n)

        chosen = choose_prompt_groups(differs, self.train_batch_size)
        uninformative = sum(not differs[prompt_group] for prompt_group in chosen)
        if uninformative:
            logger.warning(
                "step %d: %d of %d prompt groups have equal rewards after %d batches "
                "(algorithm.filter_groups.max_num_gen_batches); they stay in the batch and teach "
                "nothing",
                step,
                uninformative,
                len(chosen),
                len(batches),
            )

        rows = rows_of_prompt_groups(chosen, sampling.n)
        return DrawnBatch(
            rollout=self._chosen_rows([batch.rollout for batch in batches], rows),
            scores=Scores.join(scores).select(rows),
            generated_tokens=sum(batch.generated_tokens for batch in batches),
            engine_metrics=[metrics for batch in batches for metrics in batch.engine_metrics],
            metrics={
                "training/num_gen_batches": float(len(batches)),
                "training/generated_groups": float(len(differs)),
                "training/filtered_groups": float(len(differs) - sum(differs) - uninformative),
                "training/uninformative_groups": float(uninformative),
            },
        )

    def _draw_one_batch(
        self, step: int, number: int, sampling: SamplingParams
    ) -> tuple[DrawnBatch, Scores]:
        """Batch `number` of the step, and its scores."""
        prompts = next(self.prompts)
        with self.generator.phases.enter("gen"):
            batch = self.generator.generate(prompts, sampling, "train", step, refill=number)
            if self.scorer.has_model:
                self.generator.sleep()  # the reward model needs the memory

        with self.generator.phases.enter("reward"):
            rollout, scores = self.scorer.score(batch.rollout)
        return replace(batch, rollout=rollout), scores

    def _chosen_rows(self, rollouts: Sequence[Rollout], rows: Sequence[int]) -> Rollout:
        """The samples at `rows` of all rollouts joined; the ranks of a machine share them."""
        prompts = Prompts.join([rollout.prompts for rollout in rollouts]).select(rows)

        def choose() -> Rollout:
            return replace(Rollout.join(rollouts).select(rows), prompts=prompts)

        return self.generator.machine.compute_on_leader(choose, shared=(prompts,))

    def _check_accuracy_is_known(self, scores: Sequence[Scores]) -> None:
        if self.filters.metric == "acc":
            known = [part.correct for part in scores if part.correct is not None]
            check_correctness(known[0] if known else None, "algorithm.filter_groups.metric acc")

    def _differ(self, rollout: Rollout, scores: Scores, n: int) -> list[bool]:
        """Whether the number that has to differ does so, for each prompt group."""
        if self.filters.metric == "acc":
            unknown = [math.nan] * len(rollout)
            right = torch.tensor(scores.correct or unknown, dtype=torch.float32)
            return prompt_groups_that_differ(right, n)

        total = scores.total
        if self.filters.metric == "seq_reward":
            total = self.shaper.shape_each(total, rollout)
        return RewardUnits.of(rollout).differ(total, rollout).view(-1, n).any(dim=1).tolist()


def prompt_groups_that_differ(values: Tensor, n: int) -> list[bool]:
    """Whether the `n` values of each prompt group, [prompts * n], differ.

    NaN stands for no value; where fewer than two are left, nothing differs.
    """
    table = values.view(-1, n)
    highest = table.nan_to_num(nan=-math.inf).amax(dim=1)
    lowest = table.nan_to_num(nan=math.inf).amin(dim=1)
    return (highest > lowest).tolist()


def choose_prompt_groups(differs: Sequence[bool], count: int) -> list[int]:
    """Indices of the first `count` groups that differ, filled up with others, in order."""
    others_last = sorted(range(len(differs)), key=lambda index: not differs[index])
    return sorted(others_last[:count])


def rows_of_prompt_groups(prompt_groups: Sequence[int], n: int) -> list[int]:
    """The rows of a batch that hold these prompt groups, `n` rows each."""
    rows: list[int] = []
    for prompt_group in prompt_groups:
        rows += range(prompt_group * n, (prompt_group + 1) * n)
    return rows
