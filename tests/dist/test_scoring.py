"""Two ranks share out the scoring: both have all scores and answers, in the order of the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.sections import RewardSection
from mrlhf.rollout.scoring import Scorer
from mrlhf.trainers.evaluate import summarise
from tests.padding import pad_responses
from tests.ranks import run_ranks
from tests.rollouts import make_rollout

RESPONSES = ["#### 7", "#### 8", "none", "so #### 8.", "#### 1,000", "#### 7"]
TRUTHS = ["7", "7", "8", "8", "1000", "1000"]


def rollout() -> Rollout:
    """The responses; each character is a token."""
    size = len(RESPONSES)
    prompts = Prompts(
        token_ids=[[1]] * size,
        uid=[0] * size,
        text=["q"] * size,
        data_source=["openai/gsm8k"] * size,
        ground_truth=TRUTHS,
        extra_info=[{}] * size,
    )
    rows = [[float(ord(letter)) for letter in text] for text in RESPONSES]
    ids, mask = pad_responses(rows, torch.int64)
    zeros = torch.zeros(mask.shape)
    stopped = torch.ones(size, dtype=torch.bool)
    return make_rollout(prompts, [0, 1] * (size // 2), ids, mask, zeros, stopped)


def score(rank: int, world_size: int) -> dict[str, Any]:
    terms = [{"name": "gsm8k"}, {"name": "format", "weight": 0.5}]
    section = RewardSection.model_validate({"terms": terms})
    tokenizer: Any = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    world = dist.group.WORLD
    assert world is not None

    scorer = Scorer(section, tokenizer, None, world)
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
    # answer does not vote.
    wanted = {
        "gsm8k/reward_mean": 0.833333,
        "gsm8k/acc@1": 0.5,
        "gsm8k/pass@2": 1.0,
        "gsm8k/maj@2": 1.0,
    }
    assert {name: round(value, 6) for name, value in first["metrics"].items()} == wanted
