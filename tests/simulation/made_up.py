"""Batches of made-up rows, of the sizes that a configuration allows, and the tasks that learn them.

The first row has up to `_LONG` tokens, or twice as many with its prompt; the others have a few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mrlhf.batch import NO_VERSION, Prompts, Rollout
from mrlhf.config.roots import (
    AnyConfig,
    AnySupervised,
    CriticConfig,
    DPOConfig,
    PPOConfig,
    SFTConfig,
)
from mrlhf.data.preferences import PreferenceRows
from mrlhf.data.rollouts import ScoredResponse
from mrlhf.data.sft import SftExample
from mrlhf.parallel.layout import AxisSizes
from mrlhf.preflight.batches import trained_models
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.scoring import REPORTED_CORRECTNESS, Scores
from mrlhf.trainers.critic import ValueLearning
from mrlhf.trainers.dpo import PreferenceOptimization, ScoredPairs
from mrlhf.trainers.reward_model import PreferenceLearning
from mrlhf.trainers.sft import FineTuning
from mrlhf.trainers.supervised import SupervisedTask

_TOKEN = 1
_SHORT = 2
_LONG = 1024  # of longer ones there is only more of the same


@dataclass(frozen=True)
class MadeUpTokenizer:
    """A tokenizer that knows all ids of a model, and no text."""

    vocab_size: int

    @property
    def ids(self) -> Sequence[int]:
        """All ids."""
        return range(self.vocab_size)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""


@dataclass(frozen=True)
class MadeUpPrompts:
    """A data set of prompts."""

    size: int
    longest: int
    other_ids: Mapping[str, Mapping[int, list[int]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int]) -> Prompts:
        """The prompts of these numbers."""
        count = len(indices)
        lengths = _lengths(count, self.longest)
        return Prompts(
            token_ids=[[_TOKEN] * length for length in lengths],
            uid=list(indices),
            text=[""] * count,
            data_source=["made up"] * count,
            ground_truth=["1"] * count,
            extra_info=[{} for _ in indices],
        )


def samples_of_a_step(config: AnyConfig, world_size: int) -> int:
    """The fewest sequences, or pairs of them, of which each replica of each model has the same."""
    replicas = [AxisSizes.of(role).dp(world_size) for role, _ in trained_models(config).values()]
    return math.lcm(*replicas)


def collected(config: PPOConfig, prompts: Prompts, needs_greedy: bool) -> Collected:
    """Responses to these prompts, with scores."""
    prompts = prompts.repeat(config.rollout.n)
    samples = len(prompts)
    width = config.data.max_response_length
    lengths = torch.tensor(_lengths(samples, width))
    mask = torch.arange(width) < lengths[:, None]
    rollout = Rollout(
        prompts=prompts,
        sample_index=[row % config.rollout.n for row in range(samples)],
        response_ids=torch.where(mask, _TOKEN, 0).int(),
        response_mask=mask,
        loss_mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        versions=torch.where(mask, 0, NO_VERSION).int(),
        stopped=torch.ones(samples, dtype=torch.bool),
    )

    correct = [float(row % 2) for row in range(samples)]
    scores = Scores(torch.tensor(correct), {REPORTED_CORRECTNESS: correct})
    greedy = torch.tensor([0.0] * samples) if needs_greedy else None
    return Collected(rollout, scores, greedy, int(lengths.sum()), {})


def task_of(config: AnySupervised, rows: int) -> SupervisedTask[Any]:
    """The task of a supervised training on so many rows."""
    longest = config.data.max_length
    sides = [[_TOKEN] * length for length in _lengths(rows, longest)]
    if isinstance(config, SFTConfig):
        mask = [[0] + [1] * (len(side) - 1) for side in sides]
        return FineTuning([SftExample(*both) for both in zip(sides, mask, strict=True)], None)
    if isinstance(config, CriticConfig):
        tokens = [len(side) - 1 for side in sides]
        rewards = [([True] * count, [0.5] * count) for count in tokens]
        responses = [ScoredResponse(x, *y) for x, y in zip(sides, rewards, strict=True)]
        return ValueLearning(config.algorithm, responses, None)
    pairs = PreferenceRows([[side, side] for side in sides], [1] * rows)
    if isinstance(config, DPOConfig):
        scored = ScoredPairs(pairs, torch.tensor([[0.0, 0.0]] * rows, dtype=torch.float64))
        return PreferenceOptimization(config.dpo, scored, None)
    return PreferenceLearning(config.rm, pairs, None)


def _lengths(rows: int, longest: int) -> list[int]:
    return [min(longest, _LONG), *(min(longest, _SHORT + row % 3) for row in range(rows - 1))]
