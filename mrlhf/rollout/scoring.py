"""Scores a rollout: rules and users' functions on each rank's share of the responses, the reward
model on all ranks.

It knows how shares are cut and gathered; what a score means is said in `rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
from mrlhf.rl.names import CORRECTNESS_TERMS
from mrlhf.roles.frozen import RewardModel

REPORTED_CORRECTNESS = "acc"


@dataclass(frozen=True)
class Scores:
    """The scores of a rollout, on every rank.

    Attributes:
        total: float32 [batch], the weighted mix.
        terms: each term's own score and further numbers, by name; [batch], NaN where a response has
            none.
        answers: what the term that tells right from wrong took for each response's answer [batch],
            None where it found none; None as a whole where no term tells, or nobody asked.
    """

    total: Tensor
    terms: dict[str, list[float]]
    answers: list[str | None] | None = None

    @property
    def correct(self) -> list[float] | None:
        """Whether each response is right, 1 or 0, by a term that can tell: exact_match, gsm8k, or a
        user's `acc`.
        """
        name = _correctness(self.terms)
        return None if name is None else self.terms[name]

    def select(self, rows: Sequence[int]) -> Scores:
        """The scores of the responses at `rows`, in that order."""
        terms = {name: [column[row] for row in rows] for name, column in self.terms.items()}
        answers = None if self.answers is None else [self.answers[row] for row in rows]
        return Scores(self.total[list(rows)], terms, answers)

    @staticmethod
    def join(parts: Sequence[Scores]) -> Scores:
        """The scores of all parts, one part after the other; a term that a part lacks is NaN there."""
        names = sorted({name for part in parts for name in part.terms})
        terms = {
            name: [x for part in parts for x in part.terms.get(name, [math.nan] * len(part.total))]
            for name in names
        }
        found = [part.answers for part in parts if part.answers is not None]
        answers = (
            [answer for column in found for answer in column] if len(found) == len(parts) else None
        )
        return Scores(torch.cat([part.total for part in parts]), terms, answers)

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
        self,
        section: RewardSection,
        tokenizer: Tokenizer,
        reward_model: RewardModel | None,
        world: dist.ProcessGroup,
    ) -> None:
        self._function = RewardFunction(
            [(term.name, term.weight) for term in section.terms], timeout_s=section.timeout_s
        )
        self._tokenizer = tokenizer
        self._model = reward_model
        self._world = world

    @property
    def has_model(self) -> bool:
        """Whether scoring runs a model, which needs the device's memory."""
        return self._model is not None

    def score(self, rollout: Rollout, with_answers: bool = False) -> Scores:
        """Score every response; each rank calls it with the same rollout.

        Args:
            rollout: the responses.
            with_answers: gather the answers too; they may be as long as the responses.

        Raises:
            RewardError: a term failed, hung or returned no number, on this rank's share.
        """
        rank, world_size = self._world.rank(), self._world.size()
        external = (
            {} if self._model is None else {"reward_model": self._model.score(rollout).tolist()}
        )
        mine = range(rank, len(rollout), world_size)
        result = self._function.score(
            self._inputs(rollout, mine),
            {name: [column[row] for row in mine] for name, column in external.items()},
        )
        # An error above ends this process, and with it the job, before anyone waits here for long.
        answers = result.answers if with_answers else {}
        parts = all_gather_objects((result.scores, result.metrics, answers), self._world)
        total = torch.empty(len(rollout), dtype=torch.float32)
        names = sorted({name for _, metrics, _ in parts for name in metrics})
        terms = {name: [math.nan] * len(rollout) for name in names}
        for source, (scores, metrics, _) in enumerate(parts):
            rows = range(source, len(rollout), world_size)
            total[list(rows)] = torch.tensor(scores, dtype=torch.float32)
            for name, column in metrics.items():
                for row, value in zip(rows, column, strict=True):
                    terms[name][row] = value
        return Scores(
            total,
            terms,
            _answers([answers for _, _, answers in parts], _correctness(terms), len(rollout)),
        )

    def close(self) -> None:
        """End the processes of users' functions."""
        self._function.close()

    def _inputs(self, rollout: Rollout, rows: Sequence[int]) -> list[RewardInput]:
        prompts, lengths = rollout.prompts, rollout.response_lengths
        return [
            RewardInput(
                data_source=prompts.data_source[row],
                prompt_text=prompts.text[row],
                solution_str=self._tokenizer.decode(
                    rollout.response_ids[row, : lengths[row]].tolist()
                ),
                ground_truth=prompts.ground_truth[row],
                extra_info=prompts.extra_info[row],
                response_tokens=lengths[row],
            )
            for row in rows
        ]


def _correctness(names: Iterable[str]) -> str | None:
    """The first column that says whether a response is right."""
    for name in names:
        if name in CORRECTNESS_TERMS or name.endswith(f"/{REPORTED_CORRECTNESS}"):
            return name
    return None


def _answers(
    parts: Sequence[Mapping[str, list[str | None]]], column: str | None, batch: int
) -> list[str | None] | None:
    """The ranks' shares of the answers that the term of `column` found, joined; None where it found
    none.
    """
    term = None if column is None else column.removesuffix(f"/{REPORTED_CORRECTNESS}")
    if term is None or not any(term in part for part in parts):
        return None
    answers: list[str | None] = [None] * batch
    for source, part in enumerate(parts):
        if term in part:
            answers[source :: len(parts)] = part[term]
    return answers
