"""Scores a rollout: rules and users' functions on each rank's share of the responses, the reward model on all ranks.

It knows how shares are cut and gathered; what a score means is said in `rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.config.sections import RewardSection
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.interface import RewardInput
from mrlhf.roles.frozen import RewardModel

CORRECTNESS_TERMS = ("exact_match", "gsm8k")
REPORTED_CORRECTNESS = "acc"


@dataclass(frozen=True)
class Scores:
    """The scores of a rollout, on every rank.

    Attributes:
        total: float32 [batch], the weighted mix.
        terms: each term's own score and further numbers, by name; [batch], NaN where a response has none.
    """

    total: Tensor
    terms: dict[str, list[float]]

    @property
    def correct(self) -> list[float] | None:
        """Whether each response is right, 1 or 0, by a term that can tell: exact_match, gsm8k, or a user's `acc`."""
        for name, column in self.terms.items():
            if name in CORRECTNESS_TERMS or name.endswith(f"/{REPORTED_CORRECTNESS}"):
                return column
        return None

    def metrics(self) -> dict[str, float]:
        """Mean of each term over the responses that have it."""
        means = {}
        for name, column in self.terms.items():
            numbers = [x for x in column if not math.isnan(x)]
            means[f"reward/{name}"] = math.fsum(numbers) / len(numbers) if numbers else math.nan
        return means


class Scorer:
    """The reward of the run: its terms, and the reward model where one of them asks for it."""

    def __init__(
        self, section: RewardSection, tokenizer: Tokenizer, reward_model: RewardModel | None, world: dist.ProcessGroup
    ) -> None:
        self._function = RewardFunction(
            [(term.name, term.weight) for term in section.terms], timeout_s=section.timeout_s
        )
        self._tokenizer = tokenizer
        self._model = reward_model
        self._world = world

    def score(self, rollout: Rollout) -> Scores:
        """Score every response; each rank calls it with the same rollout.

        Raises:
            RewardError: a term failed, hung or returned no number, on this rank's share.
        """
        rank, world_size = self._world.rank(), self._world.size()
        external = {} if self._model is None else {"reward_model": self._model.score(rollout).tolist()}
        mine = range(rank, len(rollout), world_size)
        result = self._function.score(
            self._inputs(rollout, mine), {name: [column[row] for row in mine] for name, column in external.items()}
        )
        # An error above ends this process, and with it the job, before anyone waits here for long.
        parts = all_gather_objects((result.scores, result.metrics), self._world)
        total = torch.empty(len(rollout), dtype=torch.float32)
        names = sorted({name for _, metrics in parts for name in metrics})
        terms = {name: [math.nan] * len(rollout) for name in names}
        for source, (scores, metrics) in enumerate(parts):
            rows = range(source, len(rollout), world_size)
            total[list(rows)] = torch.tensor(scores, dtype=torch.float32)
            for name, column in metrics.items():
                for row, value in zip(rows, column, strict=True):
                    terms[name][row] = value
        return Scores(total, terms)

    def close(self) -> None:
        """End the processes of users' functions."""
        self._function.close()

    def _inputs(self, rollout: Rollout, rows: Sequence[int]) -> list[RewardInput]:
        prompts, lengths = rollout.prompts, rollout.response_lengths
        return [
            RewardInput(
                data_source=prompts.data_source[row],
                prompt_text=prompts.text[row],
                solution_str=self._tokenizer.decode(rollout.response_ids[row, : lengths[row]].tolist()),
                ground_truth=prompts.ground_truth[row],
                extra_info=prompts.extra_info[row],
                response_tokens=lengths[row],
            )
            for row in rows
        ]
