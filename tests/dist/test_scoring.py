"""Two ranks each score a share of the responses: both get all results in the batch's order."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from mrlhf.batch import Prompts, Rollout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.interface import RewardResult
from mrlhf.rollout.scoring import Scorer
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

    def score(self, inputs: list[Any], external: Any) -> RewardResult:
        numbers = [self._rank + 0.1 * number for number, _ in enumerate(inputs)]
        return RewardResult(
            numbers, {"both": numbers, f"of_{self._rank}": [-0.0] * len(inputs)}, {}
        )


def score(rank: int, world_size: int) -> dict[str, Any]:
    function = RewardFunction([("gsm8k", 1.0), ("format", 0.5)])
    tokenizer: Any = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    own: Any = OwnColumns(rank)
    groups = GroupFactory(60.0).role_groups(ParallelLayout(tp=1, pp=1, dp=world_size))

    scorer = Scorer(function, tokenizer, None, groups)
    with_answers = scorer.score(rollout(), with_answers=True)
    without = scorer.score(rollout())
    scorer.close()
    unlike = Scorer(own, tokenizer, None, groups).score(rollout())

    return {
        "total": with_answers.total.tolist(),
        "correct": with_answers.correct,
        "answers": with_answers.answers,
        "without": without.answers,
        "unlike": str((unlike.total.tolist(), unlike.terms)),
        "metrics": summarise(with_answers, ["gsm8k"] * 3, 2),
    }


def test_answers_come_together_in_order() -> None:
    first, second = run_ranks(2, score)
    assert first == second

    assert first["correct"] == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert first["total"] == [1.5, 0.5, 0.0, 1.0, 1.5, 0.5]
    assert first["answers"] == ["7", "8", None, "8", "1000", "7"]
    assert first["without"] is None

    total = [0.0, 1.0, 0.1, 1.1, 0.2, 1.2]
    nan = math.nan
    columns = {
        "both": total,
        "of_0": [-0.0, nan, -0.0, nan, -0.0, nan],
        "of_1": [nan, -0.0, nan, -0.0, nan, -0.0],
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
