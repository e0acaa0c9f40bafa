"""The reward of a response: a weighted sum of rules, users' functions, a judge and given scores.

It is given text, and numbers by name. It does not know tokens, nor how a reward model computes its
score.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from mrlhf.errors import ConfigError, RewardError
from mrlhf.rewards.chat_judge import ChatJudge
from mrlhf.rewards.custom import CustomReward, Limits, load_custom
from mrlhf.rewards.interface import (
    Evaluated,
    PlacedValue,
    RewardInput,
    RewardResult,
    Scored,
    check_score,
    split_score,
)
from mrlhf.rewards.rules import ANSWERS, RULES
from mrlhf.rewards.term_names import term_names

EXTERNAL_TERMS = ("reward_model", "environment", "judge")
"""Terms whose scores the caller computes; a judge that is a server is none of them."""


def mix(
    terms: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    name_row: Callable[[int], str] = "response {}".format,
) -> list[float]:
    """The weighted sum of the terms' scores [batch].

    `name_row` gives the name of a response in messages.

    Raises:
        RewardError: a term has no weight, a weight has no term, the lengths differ, or a score or
            the sum is not finite or too large.
    """
    if set(terms) != set(weights):
        raise RewardError(
            f"scores are given for {sorted(terms)} and weights for {sorted(weights)}; "
            "give both for each term"
        )
    lengths = {name: len(scores) for name, scores in terms.items()}
    if len(set(lengths.values())) > 1:
        raise RewardError(f"terms have different numbers of scores: {lengths}")
    for name, scores in terms.items():
        for row, score in enumerate(scores):
            check_score(score, f"term {name} gives {name_row(row)} the score")

    names = list(weights)
    mixed = []
    for row, scores_of_row in enumerate(zip(*(terms[name] for name in names), strict=True)):
        weighted = []
        for name, score in zip(names, scores_of_row, strict=True):
            weighted.append(weights[name] * score)
            check_score(weighted[-1], f"term {name}, weighted, gives {name_row(row)} the score")
        mixed.append(math.fsum(weighted))
        check_score(mixed[-1], f"the weighted sum of all terms gives {name_row(row)} the score")
    return mixed


class RewardFunction:
    """Scores batches by a fixed list of weighted terms.

    Attributes:
        weights: each term's weight, under its name as `term_names` gives it.
    """

    def __init__(
        self,
        terms: Sequence[tuple[str, float]],
        *,
        limits: Limits | None = None,
        judge: ChatJudge | None = None,
    ) -> None:
        """Load the terms; a user's function starts its process here. Without terms a score is 0.

        Args:
            terms: the name and the weight of each; the name of a rule or of an external term, or
                "path/to/file.py:function".
            limits: the resources of each user's function; None: no limit but a minute for each
                call.
            judge: the server that is the term `judge`, if one is.

        Raises:
            ConfigError: a name is unknown or given twice, or a weight is not finite.
            RewardError: a user's function cannot be loaded.
        """
        _check_terms(terms)
        references = [reference for reference, _ in terms]
        names = term_names(references)
        self.weights = {name: float(weight) for name, (_, weight) in zip(names, terms, strict=True)}
        self._rules = {name: RULES[name] for name in references if name in RULES}
        self.judge = judge
        self._in_use = Lock()

        self._custom: dict[str, CustomReward | ChatJudge] = {}
        if judge is not None:
            self._custom["judge"] = judge
        try:
            for name, reference in zip(names, references, strict=True):
                if ":" in reference:
                    self._custom[name] = load_custom(reference, limits or Limits())
        except RewardError:
            self.close()
            raise

    @property
    def reads_text(self) -> bool:
        """Whether a term reads the text of a response; external terms do not."""
        return bool(self._rules or self._custom or "judge" in self.weights)

    @property
    def external(self) -> list[str]:
        """The terms whose scores the caller must give to `score`."""
        given = set(EXTERNAL_TERMS).difference(self._custom)
        return [name for name in self.weights if name in given]

    def score(
        self,
        inputs: Sequence[RewardInput],
        external_scores: Mapping[str, Sequence[float]] | None = None,
    ) -> RewardResult:
        """Score the responses [batch], external terms given; RewardError if a term fails."""
        return self.combine(inputs, self.evaluate(inputs), external_scores)

    def evaluate(self, inputs: Sequence[RewardInput]) -> list[Evaluated]:
        """The results of all terms but the external ones, for each response.

        Several threads may call it; they take turns, since a user's function has one process.

        Raises:
            RewardError: a term fails.
        """
        own = [name for name in self.weights if name not in self.external]
        with self._in_use:
            columns = [self._evaluate(name, inputs) for name in own]
        return [
            {name: column[row] for name, column in zip(own, columns, strict=True)}
            for row in range(len(inputs))
        ]

    def combine(
        self,
        inputs: Sequence[RewardInput],
        evaluated: Sequence[Evaluated],
        external_scores: Mapping[str, Sequence[float]] | None = None,
    ) -> RewardResult:
        """The scores [batch] of what `evaluate` gave; RewardError if one cannot be used."""
        scores = {name: list(column) for name, column in (external_scores or {}).items()}
        further: dict[str, list[float]] = {}
        answers: dict[str, list[str | None]] = {}
        placed: list[list[PlacedValue]] = [[] for _ in evaluated]
        for name, weight in self.weights.items():
            if name in self.external:
                continue
            results = [of_response[name] for of_response in evaluated]
            scores[name] = [result.score for result in results]
            for key in sorted({key for result in results for key in result.further}):
                further[f"{name}/{key}"] = [result.further.get(key, math.nan) for result in results]
            if any(result.answer is not None for result in results):
                answers[name] = [result.answer for result in results]
            for own, result in zip(placed, results, strict=True):
                own += [x._replace(value=weight * x.value) for x in result.placed]

        mixed = [0.0] * len(inputs)
        if self.weights:
            mixed = mix(scores, self.weights, lambda row: f"the response with {inputs[row].title}")
        if len(mixed) != len(inputs):
            raise RewardError(
                f"external terms brought {len(mixed)} scores for {len(inputs)} responses"
            )
        return RewardResult(mixed, {**scores, **further}, answers, placed)

    def close(self) -> None:
        """End the processes of users' functions."""
        for custom in self._custom.values():
            custom.close()

    def _evaluate(self, name: str, inputs: Sequence[RewardInput]) -> list[Scored]:
        if name in self._custom:
            return self._custom[name].score(inputs)
        rule = self._rules[name]
        find_answer = ANSWERS.get(name)

        results = []
        for row in inputs:
            value = rule(row.data_source, row.solution_str, row.ground_truth, row.extra())
            result = split_score(value, name)
            if find_answer is not None:
                result = result._replace(answer=find_answer(row.solution_str))
            results.append(result)
        return results


def _check_terms(terms: Sequence[tuple[str, float]]) -> None:
    known = (*RULES, *EXTERNAL_TERMS)
    for name, weight in terms:
        if not math.isfinite(weight):
            raise ConfigError(f"reward term {name} has weight {weight}; weights must be finite")
        if ":" in name or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"use one of {', '.join(known)}, or path/to/file.py:function"
        )
        raise ConfigError(f"unknown reward term {name!r}; {hint}")
