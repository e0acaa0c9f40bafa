"""Two ranks each score a share of the responses: both get all results in the batch's order.

They do so too if each has scored some before the batch was complete.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrlhf.batch import Prompts, Rollout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.interface import Evaluated, PlacedValue, RewardInput, RewardResult
from mrlhf.rollout.drawn_sample import DrawnSample, TokenRun
from mrlhf.rollout.early_scores import EarlyScores
from mrlhf.rollout.scoring import Scorer, Scores
from mrlhf.trainers.ppo.held_out import summarise
from tests.padding import pad_responses
from tests.ranks import run_ranks
from tests.rollouts import make_rollout

RESPONSES = ["#### 7", "#### 8", "none", "so #### 8.", "#### 1,000", "#### 7"]
TRUTHS = ["7", "7", "8", "8", "1000", "1000"]


def rollout() -> Rollout:
    """The responses; each character is a token."""
    size = len(RESPONSES)
    ids, mask = pad_responses(
        [[float(ord(letter)) for letter in text] for text in RESPONSES], torch.int64
    )
    prompts = Prompts(
        [[1]] * size, [0] * size, ["q"] * size, ["openai/gsm8k"] * size, TRUTHS, [{}] * size
    )
    zeros = torch.zeros(mask.shape)
    stopped = torch.ones(size, dtype=torch.bool)
    return make_rollout(prompts, [0, 1] * (size // 2), ids, mask, zeros, stopped)


class OwnColumns:
    """Terms that report other numbers on each rank."""

    reads_text = False

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def evaluate(self, inputs: list[Any]) -> list[Any]:
        return [{} for _ in inputs]

    def combine(self, inputs: list[Any], evaluated: Any, external: Any) -> RewardResult:
        numbers = [self._rank + 0.1 * number for number, _ in enumerate(inputs)]
        columns = {"both": numbers, f"of_{self._rank}": [-0.0] * len(inputs)}
        values = []
        if self._rank:  # rank 0 places nothing
            values = [("character", 1, 0.5), ("token", 1, 0.25), ("token", 0, -1.0)]
            columns["own/placed"] = numbers
        placed = [[PlacedValue(*x) for x in values] if i == 1 else [] for i in range(len(inputs))]
        return RewardResult(numbers, columns, {}, placed)


# The rows that each rank has drawn; both have drawn row 0, and nobody row 4.
DRAWN = ([0, 1, 2, 3], [0, 5])


def trajectory(row: int) -> DrawnSample:
    """A response as the rank has it that drew it."""
    tokens = array("i", map(ord, RESPONSES[row]))
    logprobs = array("f", [0.0] * len(tokens))
    return DrawnSample(row, tokens, logprobs, [TokenRun(len(tokens), 0)], ended=True)


def score_early(rank: int, function: RewardFunction, plain: Scorer) -> tuple[Scores, int]:
    """Score the batch after this rank has scored what it has drawn; with the responses of then."""
    evaluated = Semaphore(0)
    late: list[RewardInput] = []

    def evaluate(inputs: Sequence[RewardInput]) -> list[Evaluated]:
        evaluated.release()
        return RewardFunction.evaluate(function, inputs)

    scorer = replace(plain, early=EarlyScores(evaluate))
    whole = rollout()
    one_each = whole.prompts.select(range(0, len(whole), 2))
    for row in DRAWN[rank]:
        scorer.begin(trajectory(row), one_each, 2)
        assert evaluated.acquire(timeout=60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "evaluate", lambda rows: late.extend(rows) or evaluate(rows))
        _, scores = scorer.score(whole, with_answers=True)
    return scores, len(late)


def score(rank: int, world_size: int) -> dict[str, Any]:
    function = RewardFunction([("gsm8k", 1.0), ("format", 0.5)])
    tokenizer: Any = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    own: Any = OwnColumns(rank)
    groups = GroupFactory(60.0).role_groups(ParallelLayout(tp=1, pp=1, dp=world_size))

    scorer = Scorer(function, tokenizer, None, groups)
    _, with_answers = scorer.score(rollout(), with_answers=True)
    _, without = scorer.score(rollout())
    early, late = score_early(rank, function, scorer)
    scorer.close()
    scored, unlike = Scorer(own, tokenizer, None, groups).score(rollout())

    return {
        "total": with_answers.total.tolist(),
        "correct": with_answers.correct,
        "answers": with_answers.answers,
        "without": without.answers,
        "is early": early.early,
        "late": late,
        "same": (
            torch.equal(early.total, with_answers.total),
            early.terms == with_answers.terms,
            early.answers == with_answers.answers,
        ),
        "share": early.metrics()["perf/scored_early"],
        "placed": scored.placed.tolist() if scored.placed is not None else None,
        "unlike": str((unlike.total.tolist(), unlike.terms)),
        "metrics": summarise(with_answers, ["gsm8k"] * 3, 2),
    }


def test_answers_come_together_in_order() -> None:
    first, second = run_ranks(2, score)
    # Rank 0 has row 0, which both have scored, and row 4.
    assert (first.pop("late"), second.pop("late")) == (1, 0)
    assert first == second
    assert first["is early"] == [True, True, True, True, False, True]
    assert first["same"] == (True, True, True)
    assert first["share"] == 5 / 6

    assert first["correct"] == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert first["total"] == [1.5, 0.5, 0.0, 1.0, 1.5, 0.5]
    assert first["answers"] == ["7", "8", None, "8", "1000", "7"]
    assert first["without"] is None

    placed = torch.zeros(6, len(max(RESPONSES, key=len)))
    placed[3, :2] = torch.tensor([-1.0, 0.75])  # the second row of rank 1
    assert first["placed"] == placed.tolist()

    total = [0.0, 1.0, 0.1, 1.1, 0.2, 1.2]
    nan = math.nan
    columns = {
        "both": total,
        "of_0": [-0.0, nan, -0.0, nan, -0.0, nan],
        "of_1": [nan, -0.0, nan, -0.0, nan, -0.0],
        "own/placed": [nan, 1.0, nan, 1.1, nan, 1.2],
    }
    rounded = torch.tensor(total, dtype=torch.float32).tolist()
    assert first["unlike"] == str((rounded, columns)), "every bit, and NaN where a rank has none"

    # Each prompt has one right answer of two. The first drawn wins a tie, and a response without an
    # answer has no vote.
    wanted = {
        "gsm8k/reward_mean": 5 / 6,
        "gsm8k/acc@1": 0.5,
        "gsm8k/pass@2": 1.0,
        "gsm8k/maj@2": 1.0,
    }
    assert {name: round(value, 6) for name, value in first["metrics"].items()} == {
        name: round(value, 6) for name, value in wanted.items()
    }
