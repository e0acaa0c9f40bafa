"""Which of the prompt groups that have begun a step takes, and when it has to go on."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from mrlhf.batch import Episode
from mrlhf.config.rollout import PartialSection
from mrlhf.episodes.limits import TurnLimits
from mrlhf.rollout.drawn_sample import DrawnSample
from mrlhf.rollout.exchange import DrawnSamples, SampleHeaders
from mrlhf.rollout.partial import Rounds, State, choose_groups, warn_of_dropped

P = State.OPEN  # a part is drawn
E = State.ENDED
F = State.FAILED


SINCE = [4, 4, 5, 5, 5]


@pytest.mark.parametrize(
    ("states", "since", "versions", "chosen"),  # two groups at version 5; so many may draw one
    [
        # The oldest groups that have ended are taken.
        ([E, P, E, E, P], SINCE, 3, [0, 2]),
        ([E, P, P, P, P], SINCE, 3, None),
        ([E, E, E], [5] * 3, 3, [0, 1]),
        # A step waits for groups that could not be taken in time: that which is left is of 4.
        ([P, E, E, P], [4, 5, 5, 5], 2, None),
        ([E, E, E, P], [4, 5, 5, 5], 2, [0, 1]),
        # The next step takes two groups, and three would have to be taken.
        ([E, E, P, P, P], [5] * 5, 2, None),
        ([E, E, P, P], [5] * 4, 2, [0, 1]),
        # Failed groups are taken only if no others can be, and are never too old.
        ([F, F, P, E, P], SINCE, 3, None),
        ([F, F, E, E, P], SINCE, 3, [2, 3]),
        ([F, F, E, E, E], SINCE, 3, [2, 3]),
        ([F, F, F, E, F], SINCE, 3, [0, 3]),
        ([F] * 5, SINCE, 3, [0, 1]),
        ([F, E, E, P], [4, 5, 5, 5], 2, [1, 2]),
    ],
)
def test_which_groups_a_step_takes(
    states: list[State], since: list[int], versions: int, chosen: list[int] | None
) -> None:
    assert choose_groups(states, since, 5, 2, versions) == chosen


@pytest.mark.parametrize(
    ("over", "batch", "begun"), [(1.1, 10, 11), (1.75, 3, 6), (2.0, 8, 16), (1.15, 100, 115)]
)
def test_a_part_of_a_prompt_is_rounded_up(over: float, batch: int, begun: int) -> None:
    assert PartialSection(over=over, max_versions=3).begun_of(batch) == begun


def test_groups_that_are_dropped_are_counted_without_those_that_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_dropped({})
    warn_of_dropped({"uids": [5], "streams": [""]})
    assert not caplog.messages
    warn_of_dropped({"uids": [5, 6, 7], "streams": ["train 1", "train 2", ""]})
    assert "2 prompts" in caplog.text


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({}, True),
        ({"max_response": 11}, True),
        ({"max_response": 10}, False),  # no room for another token of the first context
        ({"max_response": 10, "has_ended": True}, True),
        ({"contexts": [4], "max_response": 4}, True),  # 4 of the first, and 6 of the second
        ({"contexts": [4], "max_response": 3}, False),
        ({"contexts": [4], "max_response": 4, "max_prompt": 2}, False),
        ({"own": 5, "max_prompt": 5}, True),
        ({"own": 6, "max_prompt": 5}, False),
        ({"own": 6, "max_prompt": 5, "failure": "lost"}, False),  # the models read it all the same
        ({"max_turn": 3}, True),  # 2 of the present turn
        ({"max_turn": 2}, False),
        ({"max_turn": 2, "has_ended": True}, True),
    ],
)
def test_what_has_begun_goes_on_if_the_limits_allow_it(limits: dict[str, Any], fits: bool) -> None:
    """An episode of 10 tokens that is in its second turn."""
    case = {"max_response": 20, "max_prompt": 5, "max_turn": None, "own": 0, "failure": ""} | limits
    episode = replace(
        _episode([0, 8], [6], case["failure"]),
        prompt_ids=[1] * case["own"] or None,
        context_begins=case.get("contexts", []),
    )
    most = case["max_prompt"], case["max_response"]
    turn_limits = TurnLimits(4, case["max_turn"], 8, *most, "tell", "tell")
    assert turn_limits.fits(episode, 10, case.get("has_ended", False)) == fits


def _episode(begins: list[int], turns: list[int], failure: str = "") -> Episode:
    return Episode(turn_begins=begins, turns=turns, failure=failure)


def _samples(*trajectories: DrawnSample) -> DrawnSamples:
    episodes = {one.row: one.episode for one in trajectories if one.episode is not None}
    headers = SampleHeaders.of(trajectories)
    return replace(DrawnSamples.none(1), headers=headers, episodes=episodes)


def _drawn(row: int, length: int, ended: bool, episode: Episode | None) -> DrawnSample:
    numbers = array("i", [0] * length), array("f", [0.0] * length)
    return DrawnSample(row, *numbers, ended=ended, episode=episode)


def test_after_an_interruption_samples_count_from_where_they_ended() -> None:
    """Episodes of two turns: 4 tokens, 2 that were told, and 5."""
    begins, turns = [0, 6], [4, 11]
    before = [
        _drawn(1, 7, False, _episode(begins, turns[:1])),  # the first token of its second turn
        _drawn(3, 11, True, _episode(begins, turns)),
        _drawn(4, 1, True, _episode([], [], "lost")),
    ]
    drawn = [
        _drawn(0, 11, True, _episode(begins, turns, "lost")),
        _drawn(1, 11, True, _episode(begins, turns)),
        _drawn(2, 1, True, _episode([], [], "lost at its reset")),
        *before[1:],
    ]
    earlier = _samples(*before)
    found = {}
    for limit in (1, 3, 4, 10, 11):
        given: Any = (None, earlier, _samples(*drawn), 5, 1, iter([limit]), 2, None)
        found[limit] = Rounds(*given).states

    assert found[1] == found[3] == [P, P, F, E, F]
    assert found[4] == found[10] == [P, E, F, E, F]
    assert found[11] == [F, E, F, E, F]  # 4 tokens, 2 for a turn, and 5
