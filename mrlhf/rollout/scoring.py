"""Scores a rollout with rules, users' functions and the reward model.

Each rank runs rules and users' functions on its share of the responses; all ranks together run the
reward model. A rank's share begins with what it has scored while the engine still drew. This file
knows how shares are cut and gathered. It does not know what a score means: see `rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from mrlhf.batch import Episode, Prompts, Rollout
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.parallel.collectives import all_gather_objects, wait_for_all
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.phases import Phases
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.interface import Evaluated, RewardInput, RewardResult, Scored
from mrlhf.rl.names import CORRECTNESS_TERMS
from mrlhf.roles.reward_model import RewardModel
from mrlhf.rollout.drawn_sample import DrawnSample
from mrlhf.rollout.early_scores import EarlyScore, EarlyScores
from mrlhf.rollout.response import Response

T = TypeVar("T")
REPORTED_CORRECTNESS = "acc"
ENVIRONMENT = "environment"
REWARD_MODEL = "reward_model"
PLACED = "placed"  # the further number of a term that places values on tokens

# Responses that are scored before a rank may stop; a user's function may take long for each.
_UNIT_ROWS = 4


@dataclass(frozen=True)
class Scores:
    """The scores of a rollout, on every rank."""

    total: Tensor  # float32 [batch], the weighted sum of all terms
    # each term's own score and further numbers, by name; [batch], NaN where a response has none
    terms: dict[str, list[float]]
    # [batch], the answer of each response, from the term that tells right from wrong; None where it
    # finds none. The field is None if no term says so, or if the caller did not want answers.
    answers: list[str | None] | None = None
    # [batch], whether scoring began while the engine still drew; None without `rollout.overlap`
    early: list[bool] | None = None

    @property
    def correct(self) -> list[float] | None:
        """1 for a right response, 0 for a wrong one; None if no term says which."""
        name = _correctness_column(self.terms)
        return None if name is None else self.terms[name]

    def select(self, rows: Sequence[int]) -> Scores:
        """The scores of the responses at `rows`, in that order."""
        terms = {name: [column[row] for row in rows] for name, column in self.terms.items()}
        answers = None if self.answers is None else [self.answers[row] for row in rows]
        early = None if self.early is None else [self.early[row] for row in rows]
        return Scores(self.total[list(rows)], terms, answers, early)

    @staticmethod
    def join(parts: Sequence[Scores]) -> Scores:
        """The scores of all parts, one part after the other.

        A term that a part lacks is NaN for it; another column is kept only if every part has it.
        """
        columns = _join_columns([(len(part.total), part.terms) for part in parts], math.nan)
        terms = dict(sorted(columns.items()))
        total = torch.cat([part.total for part in parts])
        answers = _join_lists([part.answers for part in parts])
        return Scores(total, terms, answers, _join_lists([part.early for part in parts]))

    def metrics(self) -> dict[str, float]:
        """Mean of each term over the responses that have it; the share of early scores."""
        means = {}
        if self.early is not None:
            means["perf/scored_early"] = fmean(self.early)
        for name, column in self.terms.items():
            numbers = [x for x in column if not math.isnan(x)]
            title = name if name.startswith("judge/") else f"reward/{name}"
            means[title] = math.fsum(numbers) / len(numbers) if numbers else math.nan
        return means


@dataclass(frozen=True)
class Scorer:
    """Scores responses with the terms of the run, and with the reward model if a term needs it."""

    function: RewardFunction  # the terms, which `close` ends
    tokenizer: Tokenizer
    reward_model: RewardModel | None
    groups: RoleGroups  # responses are shared out among all ranks
    # is told how many of this rank's responses are scored; all ranks may stop after every few
    phases: Phases = field(default_factory=Phases)
    # the judge on the ranks, if a term needs it; all ranks call it with all responses
    judge: Callable[[Sequence[RewardInput], Sequence[int]], list[Scored]] | None = None
    early: EarlyScores | None = None  # None: nothing is scored before its batch is drawn

    @property
    def has_model(self) -> bool:
        """Whether scoring runs a model, which needs the device's memory."""
        return self.reward_model is not None or self.judge is not None

    def score(self, rollout: Rollout, with_answers: bool = False) -> tuple[Rollout, Scores]:
        """Score every response; each rank calls it with the same rollout.

        The first result is the rollout with the values that terms have placed on its tokens.
        Answers may be as long as responses, so they are gathered only `with_answers`.

        Raises:
            RewardError: a term failed, hung or returned no number for this rank's share.
            Interrupted: the run stops here.
        """
        world = self.groups.world

        given: dict[str, list[float]] = {}
        further: dict[str, list[float]] = {}
        steps: Tensor | None = None
        if self.reward_model is not None and len(self.reward_model.ends):
            steps = self.reward_model.step_scores(rollout)
            given[REWARD_MODEL] = [0.0] * len(rollout)
            further[f"{REWARD_MODEL}/{PLACED}"] = steps.double().sum(dim=1).tolist()
        elif self.reward_model is not None:
            scores, own = self.reward_model.score(rollout)
            given[REWARD_MODEL] = scores.tolist()
            further |= {f"{REWARD_MODEL}/{name}": each.tolist() for name, each in own.items()}
        if rollout.episodes is not None and ENVIRONMENT in self.function.external:
            given[ENVIRONMENT] = [episode.score or 0.0 for episode in rollout.episodes]
            further |= _numbers_of(rollout.episodes)
        if self.judge is not None:
            lengths = rollout.response_lengths
            rows = [self._input(rollout, row, lengths) for row in range(len(rollout))]
            judged = self.judge(rows, rollout.prompt_groups.tolist())
            given["judge"] = [result.score for result in judged]
            further["judge/unparsed"] = [result.further["unparsed"] for result in judged]

        with self._taking_early(rollout) as begun:
            owners, is_early = self._share_out(len(rollout), begun)
            my_rows = (owners == world.rank()).nonzero()[:, 0]
            result = self._score_rows(rollout, my_rows.tolist(), given, begun)

        wait_for_all(world)  # an error above ends the job
        names = self._column_names(result.metrics)
        absent = [math.nan] * len(my_rows)
        mine = [result.scores, *(result.metrics.get(name, absent) for name in names)]
        numbers = torch.tensor(mine, dtype=torch.float64, device="cpu")
        table = self.groups.machine.table((len(mine), len(rollout)), torch.int64)
        table.entries[:, my_rows] = numbers.view(torch.int64)  # 0 + bits are these bits
        total, *columns = table.complete().view(torch.float64)
        terms = {name: column.tolist() for name, column in zip(names, columns, strict=True)}
        terms |= further
        if steps is not None or any(name.endswith(f"/{PLACED}") for name in names):
            rollout = self._placed(rollout, my_rows.tolist(), result, steps)

        answers_of_ranks = all_gather_objects(result.answers, world) if with_answers else []
        answers = _join_answers(answers_of_ranks, _correctness_column(terms), owners.tolist())
        return rollout, Scores(total.to(torch.float32), terms, answers, is_early)

    def begin(self, drawn: DrawnSample, prompts: Prompts, n: int) -> None:
        """Score a response that this rank's replica has drawn, while it draws others.

        It is one of `n` to its prompt. Without `early` nothing happens. A later `score` finds it.
        """
        # A failed episode is drawn again if the run stops before its batch is complete.
        if self.early is None or drawn.has_failed:
            return
        prompt, sample = divmod(drawn.row, n)
        response = Response.of_sample(drawn, prompts, prompt)
        given = response.read(self.tokenizer, self.function.reads_text)
        self.early.add((prompts.uid[prompt], sample), response, given)

    def _taking_early(self, rollout: Rollout) -> AbstractContextManager[dict[int, EarlyScore]]:
        """See `EarlyScores.taking`."""
        return nullcontext({}) if self.early is None else self.early.taking(rollout)

    def _share_out(self, batch: int, begun: Iterable[int]) -> tuple[Tensor, list[bool] | None]:
        """Which rank scores each row, int64 [batch]: the one that has begun to, or one in turn."""
        world = self.groups.world
        nobody = world.size()
        owners = torch.full((batch,), nobody, dtype=torch.int64, device="cpu")
        if self.early is not None:
            owners[list(begun)] = world.rank()
            dist.all_reduce(owners, dist.ReduceOp.MIN, group=world)

        is_early = owners < nobody
        left = (~is_early).nonzero()[:, 0]
        owners[left] = torch.arange(len(left)) % world.size()
        return owners, None if self.early is None else is_early.tolist()

    def _column_names(self, own: Iterable[str]) -> list[str]:
        """The names of the columns on all ranks, sorted; they are gathered only if they differ."""
        mine = sorted(own)
        world = self.groups.world
        table = self.groups.machine.table((world.size(),), torch.int64)
        table.entries[world.rank()] = xxhash.xxh3_64_intdigest(repr(mine).encode()) >> 1
        hashes = table.complete()
        if bool((hashes == hashes[0]).all()):
            return mine
        return sorted({name for names in all_gather_objects(mine, world) for name in names})

    def close(self) -> None:
        """End the processes of users' functions."""
        if self.early is not None:
            self.early.close()
        self.function.close()

    def _score_rows(
        self,
        rollout: Rollout,
        rows: Sequence[int],
        given: Mapping[str, Sequence[float]],
        begun: Mapping[int, EarlyScore],
    ) -> RewardResult:
        """Score the responses at `rows`, unless the run stops meanwhile.

        `given` has the scores [batch] of the terms that are scored elsewhere, `begun` the rows that
        were begun before.
        """
        parts = []
        lengths = rollout.response_lengths
        with self.phases.interruptible() as may_begin:
            judge = self.function.judge
            together = _UNIT_ROWS if judge is None else max(_UNIT_ROWS, judge.rows_at_once)
            for unit, begin in enumerate(range(0, len(rows), together)):
                self.phases.advance(begin, len(rows), "responses")
                if not may_begin(unit):
                    break

                some = rows[begin : begin + together]
                external = {name: [column[row] for row in some] for name, column in given.items()}
                inputs = {
                    row: begun[row].given if row in begun else self._input(rollout, row, lengths)
                    for row in some
                }
                evaluated = self._evaluate(inputs, begun)
                parts.append(self.function.combine(list(inputs.values()), evaluated, external))
        return _join_results(parts)

    def _evaluate(
        self, inputs: Mapping[int, RewardInput], begun: Mapping[int, EarlyScore]
    ) -> list[Evaluated]:
        """The results of the terms for some rows."""
        fresh = [row for row in inputs if row not in begun]
        evaluated: dict[int, Evaluated] = {}
        if fresh:
            results = self.function.evaluate([inputs[row] for row in fresh])
            evaluated.update(zip(fresh, results, strict=True))
        return [begun[row].evaluated.result() if row in begun else evaluated[row] for row in inputs]

    def _placed(
        self, rollout: Rollout, rows: Sequence[int], result: RewardResult, steps: Tensor | None
    ) -> Rollout:
        """The rollout with `steps` and the values of the other terms; `rows` are this rank's."""
        table = self.groups.machine.table(rollout.shape, torch.float32)
        for row, placed in zip(rows, result.placed, strict=True):
            if placed:
                response = Response.of_row(rollout, row, int(rollout.response_mask[row].sum()))
                for token, value in response.places(placed, self.tokenizer):
                    table.entries[row, token] += value
        every = table.complete()
        if steps is not None:
            every = every + steps * self.function.weights[REWARD_MODEL]
        return replace(rollout, placed=every)

    def _input(self, rollout: Rollout, row: int, lengths: Sequence[int]) -> RewardInput:
        """The terms' input for the response at `row`; `lengths` covers all responses."""
        response = Response.of_row(rollout, row, lengths[row])
        return response.read(self.tokenizer, self.function.reads_text)


def _numbers_of(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """The further numbers [batch] that environments gave, by name; NaN where one gave none."""
    names = sorted({name for episode in episodes for name in episode.further})
    return {
        f"{ENVIRONMENT}/{name}": [episode.further.get(name, math.nan) for episode in episodes]
        for name in names
    }


def _join_results(parts: Sequence[RewardResult]) -> RewardResult:
    """Join the results of all parts; where a part lacks a column, it gets NaN or None."""
    scores = [score for part in parts for score in part.scores]
    metrics = [(len(part.scores), part.metrics) for part in parts]
    answers = [(len(part.scores), part.answers) for part in parts]
    placed = [values for part in parts for values in part.placed]
    return RewardResult(
        scores, _join_columns(metrics, math.nan), _join_columns(answers, None), placed
    )


def _join_columns(
    parts: Sequence[tuple[int, Mapping[str, list[T]]]], missing: T
) -> dict[str, list[T]]:
    """The columns of all parts, each with its number of rows; a part that lacks one is filled."""
    names = dict.fromkeys(name for _, columns in parts for name in columns)
    joined: dict[str, list[T]] = {name: [] for name in names}
    for rows, columns in parts:
        for name, column in joined.items():
            column += columns.get(name, [missing] * rows)
    return joined


def _join_lists(parts: Sequence[list[T] | None]) -> list[T] | None:
    """All parts, one after the other; None if one is missing."""
    joined: list[T] = []
    for part in parts:
        if part is None:
            return None
        joined += part
    return joined


def _correctness_column(names: Iterable[str]) -> str | None:
    """The first of the columns that says whether a response is right, or None."""
    for name in names:
        if name in CORRECTNESS_TERMS or name.endswith(f"/{REPORTED_CORRECTNESS}"):
            return name
    return None


def _join_answers(
    answers_of_ranks: Sequence[Mapping[str, list[str | None]]],
    correctness_column: str | None,
    owners: Sequence[int],
) -> list[str | None] | None:
    """The answers [batch] of the term that tells right from wrong; None if it found none.

    For each rank there are the answers in its share of the responses, by term; `owners` [batch] has
    the rank whose share a response is in.
    """
    if correctness_column is None:
        return None
    term = correctness_column.removesuffix(f"/{REPORTED_CORRECTNESS}")
    if not any(term in answers for answers in answers_of_ranks):
        return None

    shares = [iter(answers.get(term, ())) for answers in answers_of_ranks]
    return [next(shares[owner], None) for owner in owners]
