"""The turns that a rollout function asks for, and the response that its trajectories make."""

from __future__ import annotations

from typing import Any

import pytest

from mrlhf.batch import Episode
from mrlhf.episodes.functions import FunctionError, FunctionTurns, NoRoomError
from mrlhf.episodes.limits import TurnLimits
from mrlhf.inference.base import Sample
from mrlhf.rollout.drawn_sample import DrawnSample

LIMITS = (TurnLimits(4, 5, 8, 4, 8, "tell", "tell"), frozenset(range(50)))


def _sample(ids: list[int], version: int = 3) -> Sample:
    logprobs = [-one / 10 for one in ids]
    return Sample(0, 0, ids, logprobs, stopped=ids[-1] == 9, version=version)


def _asked(*turns: tuple[list[int], list[int]]) -> FunctionTurns:
    """Turns by what was asked for, and what was drawn behind it."""
    asked = FunctionTurns()
    for ids, drawn in turns:
        number, *_ = asked.ask(ids, None, *LIMITS)
        asked.drawn[number] = _sample(drawn)
    return asked


def _assembled(asked: FunctionTurns, *returned: dict[str, Any]) -> tuple[DrawnSample, Episode]:
    """The response that trajectories make."""
    episode = Episode()
    response = DrawnSample(0, episode=episode)
    asked.assemble(returned, response)
    return response, episode


def _trajectory(ids: list[int], *turns: tuple[int, int], **more: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": "", "reward": None, "turn_rewards": []}
    return {"token_ids": ids, "turns": list(turns), **plain, **more}


def test_a_turn_has_the_room_that_is_left() -> None:
    asked = FunctionTurns()
    assert asked.ask([1] * 4, None, *LIMITS)[:2] == (0, 5)
    assert asked.ask([1] * 4, 3, *LIMITS)[:2] == (1, 3)
    assert asked.ask([1] * 10, 8, *LIMITS)[:2] == (2, 2)
    with pytest.raises(NoRoomError, match="the trajectory has 12 tokens"):
        asked.ask([1] * 12, None, *LIMITS)
    asked.ask([1] * 11, None, *LIMITS)
    with pytest.raises(NoRoomError, match=r"rollout\.max_turns 4"):
        asked.ask([1], None, *LIMITS)


def test_random_numbers_depend_on_what_is_read_and_not_on_the_order() -> None:
    one, other = FunctionTurns(), FunctionTurns()
    asked = ([1, 2], [3], [1, 2])
    names = [one.ask(ids, None, *LIMITS)[2] for ids in asked]
    again = [other.ask(ids, None, *LIMITS)[2] for ids in reversed(asked)]
    assert sorted(names) == sorted(again) and len({*names}) == 3


@pytest.mark.parametrize(
    ("ids", "most", "problem"),
    [
        ([], None, "at least one token id"),
        ([1, 77], None, "all of the tokenizer's"),
        ([1, True], None, "all of the tokenizer's"),
        ([1, "2"], None, "all of the tokenizer's"),
        ([1], 0, "max_tokens 0"),
        ([1], 2.0, r"max_tokens 2\.0"),
    ],
)
def test_a_wrong_question_is_refused(ids: list[Any], most: Any, problem: str) -> None:
    with pytest.raises(FunctionError, match=problem):
        FunctionTurns().ask(ids, most, *LIMITS)


def test_trajectories_follow_each_other_and_train_once() -> None:
    asked = _asked(([1, 2], [5, 9]), ([1, 2, 5, 9, 7], [6]), ([1, 2, 5, 9, 8, 8], [4, 4]))
    response, episode = _assembled(
        asked,
        _trajectory([1, 2, 5, 9, 7, 6, 30], (0, 2), (1, 5)),  # the last one is not read
        _trajectory([1, 2, 5, 9, 8, 8, 4, 4], (0, 2), (2, 6), reward=0.5),
    )
    assert episode.prompt_ids == [1, 2]
    assert response.token_ids.tolist() == [5, 9, 7, 6, 1, 2, 5, 9, 8, 8, 4, 4]
    assert response.runs == [(2, 3), (1, -1), (1, 3), (6, -1), (2, 3)]
    assert response.logprobs.tolist() == pytest.approx([-0.5, -0.9, 0, -0.6, *[0] * 6, -0.4, -0.4])
    assert (episode.turn_begins, episode.turns) == ([0, 3, 10], [2, 4, 12])
    assert (episode.context_begins, episode.context_prompts) == ([4], [6])
    assert (episode.context_roles, episode.turn_rewards) == ([], [])  # all share the reward
    assert episode.score == 0.5 and not response.stopped


def test_rewards_of_their_own_stand_at_last_turns() -> None:
    asked = _asked(([1], [2]), ([1, 2, 3], [9]), ([4], [5, 9]), ([4], [6]))
    _, episode = _assembled(
        asked,
        _trajectory([1, 2, 3, 9], (0, 1), (1, 3), role="x", reward=1.0),
        _trajectory([4, 5, 9], (2, 1), role="o", reward={"score": -1.0, "moves": 2.0}),
        _trajectory([4, 6], (3, 1), role="o", reward=0.5),
    )
    assert episode.turn_rewards == [0.0, 1.0, -1.0, 0.5]
    assert episode.context_roles == ["x", "o", "o"]
    assert (episode.score, episode.further) == (0.0, {"x/reward": 1.0, "o/reward": -0.25})


def test_rewards_of_turns_stand_beside_those_of_trajectories() -> None:
    asked = _asked(([1], [2]), ([1, 2, 3], [9]), ([1, 2, 4], [6]))
    one = _trajectory([1, 2, 3, 9], (0, 1), (1, 3), reward=0.5, turn_rewards=[1.0, 2.0])
    other = _trajectory([1, 2, 4, 6], (0, 1), (2, 3), turn_rewards=[8.0, 4.0])
    _, shared = _assembled(asked, one, other)
    assert (shared.turn_rewards, shared.score) == ([1.0, 2.0, 4.0], 0.5)  # each turn once

    _, own = _assembled(asked, one | {"role": "x"}, other | {"role": "y", "reward": -1.0})
    assert own.turn_rewards == [1.0, 2.5, 3.0]
    assert (own.score, own.further) == (0.0, {"x/reward": 3.5, "y/reward": 3.0})


def test_a_lone_trajectory_with_a_role_is_compared_by_it() -> None:
    """Some players win before others have a turn; their episodes have one trajectory."""
    asked = _asked(([1, 2], [5, 9]))
    _, own = _assembled(asked, _trajectory([1, 2, 5, 9], (0, 2), role="x", reward=1.0))
    assert (own.context_roles, own.turn_rewards) == (["x"], [1.0])
    assert (own.score, own.further) == (0.0, {"x/reward": 1.0})

    _, shared = _assembled(asked, _trajectory([1, 2, 5, 9], (0, 2), reward=1.0))
    assert (shared.context_roles, shared.turn_rewards, shared.score) == ([], [], 1.0)
    _, none = _assembled(asked, _trajectory([1, 2, 5, 9], (0, 2), role="x"))
    assert (none.context_roles, none.score) == ([], None)


@pytest.mark.parametrize(
    ("trajectories", "problem"),
    [
        ([_trajectory([1, 2, 3], (0, 2))], "other tokens than those that were drawn"),
        ([_trajectory([1, 3, 5, 9], (0, 2))], "other tokens than those that were drawn"),
        ([_trajectory([1, 2, 5, 9], (7, 2))], "other tokens than those that were drawn"),
        ([_trajectory([1, 2**40, 5, 9], (0, 2))], "other tokens than those that were drawn"),
        ([_trajectory([1, 2, 5, 9], (0, "2"))], "other tokens than those that were drawn"),
        ([_trajectory([1, 2, 5, 9], (0, 2), (0, 2))], "other tokens than those that were drawn"),
        ([_trajectory([1, 2, 5, 9], (0, 2))] * 2, "that others before it contain"),
        (
            [
                _trajectory([1, 2, 5, 9], (0, 2), reward=1.0),
                _trajectory([3, 6], (1, 1), reward=1.0),
                _trajectory([4, 7], (2, 1)),
            ],
            "2 of 3 trajectories have a reward",
        ),
    ],
)
def test_trajectories_that_were_not_drawn_are_refused(
    trajectories: list[dict[str, Any]], problem: str
) -> None:
    asked = _asked(([1, 2], [5, 9]), ([3], [6]), ([4], [7]))
    response = DrawnSample(0, episode=Episode())
    with pytest.raises(FunctionError, match=problem):
        asked.assemble(trajectories, response)
    assert response == DrawnSample(0, episode=Episode())
