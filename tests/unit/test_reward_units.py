"""Contexts with rewards of their own: what is compared with what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mrlhf.batch import Prompts, Rollout
from mrlhf.rollout.reward_units import RewardUnits
from tests.rollouts import make_rollout, with_contexts


def _rollout(roles: list[list[str]], rewards: list[list[float]]) -> Rollout:
    """Two prompts with two samples of six tokens; each begins anew after three, with a prompt."""
    prompts = Prompts([[1]] * 4, [5, 5, 8, 8], [""] * 4, [""] * 4, [""] * 4, [{}] * 4)
    ids = torch.ones(4, 6, dtype=torch.int32)
    rollout = make_rollout(
        prompts, [0, 1, 0, 1], ids, ids.bool(), torch.zeros(4, 6), torch.ones(4, dtype=torch.bool)
    )
    rollout = with_contexts(rollout, {row: [(3, 1)] for row in range(4)})
    assert rollout.episodes is not None
    episodes = [
        replace(episode, turns=[3, 6], turn_rewards=given, context_roles=names)
        for episode, given, names in zip(rollout.episodes, rewards, roles, strict=True)
    ]
    return replace(rollout, episodes=episodes)


def test_contexts_are_compared_with_those_of_their_role_and_prompt() -> None:
    roles = [["x", "o"], ["o", "x"], ["x", "x"], []]
    rollout = _rollout(roles, [[1, -1], [-1, 1], [2, 3], [0, 4]])
    units = RewardUnits.of(rollout)
    assert units.rows is not None and units.rows.tolist() == [0, 0, 1, 1, 2, 2, 3]
    first, second = [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]
    whole = [1, 1, 1, 0, 1, 1]
    assert units.mask.int().tolist() == [first, second] * 3 + [whole]
    x, o, o_again, x_again, *others = units.groups.tolist()
    assert x == x_again != o == o_again
    assert others[0] == others[1] != others[2] and not {x, o} & {*others}

    scores = units.scores(torch.tensor([0.5, 0.0, 0.0, 1.0]), rollout)
    assert scores.tolist() == [1.5, -0.5, -1, 1, 2, 3, 5]
    table = torch.arange(7)[:, None].expand(7, 6) + 1
    folded = units.fold(table, 4)
    assert folded.tolist() == [
        [1, 1, 1, 0, 2, 2],
        [3, 3, 3, 0, 4, 4],
        [5, 5, 5, 0, 6, 6],
        [7, 7, 7, 0, 7, 7],
    ]


@pytest.mark.parametrize(
    ("rewards", "differs"),
    [
        # Each sum is the same; what differs is the reward of a role.
        ([[1, -1], [-1, 1], [1, -1], [1, -1]], [True, True, False, False]),
        ([[1, 0], [2, 0], [0, 3], [0, 3]], [True, True, False, False]),
    ],
)
def test_what_differs_in_a_role_differs(rewards: list[list[float]], differs: list[bool]) -> None:
    rollout = _rollout([["x", "o"]] * 4, rewards)
    assert RewardUnits.of(rollout).differ(torch.zeros(4), rollout).tolist() == differs


def test_responses_that_share_their_rewards_are_not_copied() -> None:
    rollout = _rollout([[]] * 4, [[1, 0], [0, 1], [0, 0], [1, 1]])
    units = RewardUnits.of(rollout)
    assert units.mask is rollout.loss_mask and units.rows is None
    assert units.fold(rollout.rollout_logprobs, 4) is rollout.rollout_logprobs
    differs = units.differ(torch.zeros(4), rollout)
    assert differs.tolist() == [False, False, True, True]
