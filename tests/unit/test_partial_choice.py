"""Which of the prompt groups that have begun a step takes, and when it has to go on."""

from __future__ import annotations

import pytest

from mrlhf.config.rollout import PartialSection
from mrlhf.rollout.partial import State, choose_groups, warn_of_dropped

P = State.OPEN  # a part is drawn
E = State.ENDED
F = State.FAILED


def test_the_oldest_groups_that_have_ended_are_taken() -> None:
    assert choose_groups([E, P, E, E, P], [4, 4, 5, 5, 5], 5, 2, 3) == [0, 2]
    assert choose_groups([E, P, P, P, P], [4, 4, 5, 5, 5], 5, 2, 3) is None
    assert choose_groups([E, E, E], [5, 5, 5], 5, 2, 3) == [0, 1]


def test_a_step_waits_for_groups_that_could_not_be_taken_in_time() -> None:
    # The group that is left is of version 4, and two versions may draw it: 4 and 5.
    assert choose_groups([P, E, E, P], [4, 5, 5, 5], 5, 2, 2) is None
    assert choose_groups([E, E, E, P], [4, 5, 5, 5], 5, 2, 2) == [0, 1]
    # The next step takes two groups, and three would have to be taken.
    assert choose_groups([E, E, P, P, P], [5] * 5, 5, 2, 2) is None
    assert choose_groups([E, E, P, P], [5] * 4, 5, 2, 2) == [0, 1]


def test_failed_groups_are_taken_only_if_no_others_can_be() -> None:
    since = [4, 4, 5, 5, 5]
    assert choose_groups([F, F, P, E, P], since, 5, 2, 3) is None
    assert choose_groups([F, F, E, E, P], since, 5, 2, 3) == [2, 3]
    assert choose_groups([F, F, E, E, E], since, 5, 2, 3) == [2, 3]
    assert choose_groups([F, F, F, E, F], since, 5, 2, 3) == [0, 3]
    assert choose_groups([F] * 5, since, 5, 2, 3) == [0, 1]


def test_a_failed_group_is_never_too_old() -> None:
    assert choose_groups([F, E, E, P], [4, 5, 5, 5], 5, 2, 2) == [1, 2]


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
