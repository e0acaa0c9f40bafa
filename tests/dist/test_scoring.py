"""Two ranks each score a share of the responses: both get all results in the batch's order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.batch import Prompts, Rollout
from mrlhf.rewards.combine import RewardFunction
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


def score(rank: int, world_size: int) -> dict[str, Any]:
    function = RewardFunction([("gsm8k", 1.0), ("format", 0.5)])
    tokenizer: Any = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    world = dist.group.WORLD
    assert world is not None

    scorer = Scorer(function, tokenizer, None, world)
    with_answers = scorer.score(rollout(), with_answers=True)
    without = scorer.score(rollout())
    scorer.close()

    return {
        "total": with_answers.total.tolist(),
        "correct": with_answers.correct,
        "answers": with_answers.answers,
        "without": without.answers,
        "metrics": summarise(with_answers, ["gsm8k"] * 3, 2),
    }


def test_answers_come_together_in_order() -> None:
    first, second = run_ranks(2, score)
    assert first == second

    assert first["correct"] == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert first["total"] == [1.5, 0.5, 0.0, 1.0, 1.5, 0.5]
    assert first["answers"] == ["7", "8", None, "8", "1000", "7"]
    assert first["without"] is None

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
