"""The samples on the console, word for word."""

from __future__ import annotations

from typing import cast

import torch

from mrlhf.batch import Prompts
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.rollout.scoring import Scores
from mrlhf.trainers.ppo.report import describe_samples
from tests.rollouts import as_episodes, make_rollout


class Letters:
    """Token 1 is "a", token 2 is "b", and so on."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(96 + token) for token in tokens)


def test_the_first_sample_of_each_prompt_is_shown() -> None:
    prompts = Prompts(
        token_ids=[[1], [2]],
        uid=[0, 1],
        text=["line 1\nline 2", "x" * 700],
        data_source=["sums", "essays"],
        ground_truth=[4, None],
        extra_info=[{}, {}],
    )
    mask = torch.tensor([[True, True], [True, False]]).repeat_interleave(2, dim=0)
    rollout = make_rollout(
        prompts.repeat(2),
        sample_index=[0, 1, 0, 1],
        response_ids=torch.tensor([[1, 2], [9, 9], [3, 0], [9, 0]]),
        response_mask=mask,
        rollout_logprobs=torch.zeros(4, 2),
        stopped=torch.tensor([True, True, False, True]),
    )
    scores = Scores(torch.tensor([0.5, 9.0, -1.0, 9.0]), {})
    tokenizer = cast(Tokenizer, Letters())

    assert describe_samples(rollout, scores, tokenizer, count=5).split("\n") == [
        "  sums, score 0.5",
        r"    prompt   'line 1\nline 2'",
        "    response 'ab'",
        "    answer   '4'",
        "  essays, score -1, cut off at a limit",
        f"    prompt   '{'x' * 300}' ... 100 characters ... '{'x' * 300}'",
        "    response 'c'",
    ]
    assert describe_samples(rollout, scores, tokenizer, count=1).count("score") == 1

    episodes = as_episodes(rollout, [[0.125, 0.125], [], [], []])
    shown = describe_samples(episodes, scores, tokenizer, count=1)
    assert shown.startswith("  sums, score 0.75\n")
