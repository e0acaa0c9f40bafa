"""What a validation reports for given scores, the majority vote, and how answers are joined."""

from __future__ import annotations

import math

import pytest
import torch

from mrlhf.rollout.scoring import Scores, _correctness_column, _join_answers
from mrlhf.trainers.ppo.held_out import held_out_metrics, majority, prompt_errors, summarise


def scores(
    total: list[float],
    right: list[float] | None = None,
    answers: list[str | None] | None = None,
    term: str = "gsm8k",
) -> Scores:
    return Scores(torch.tensor(total), {} if right is None else {term: right}, answers)


def test_one_answer_a_prompt() -> None:
    found = summarise(
        scores([1.5, -0.5, 4.0], [1.0, 0.0, 1.0], ["1", "2", "3"]), ["a", "a", "b"], 1
    )
    assert found == {"a/reward_mean": 0.5, "a/acc@1": 0.5, "b/reward_mean": 4.0, "b/acc@1": 1.0}
    assert summarise(scores([1.5, -0.5]), ["a", "a"], 1) == {"a/reward_mean": 0.5}


def test_many_answers_a_prompt() -> None:
    # Three prompts of the sources a, b, a with three answers each.
    right = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    answers: list[str | None] = ["4", "5", "4", "1", "2", "3", "9", "8", "9"]
    found = summarise(
        scores([0.0, 1.0, 2.0, 6.0, 6.0, 6.0, 3.0, 4.0, 5.0], right, answers), ["a", "b", "a"], 3
    )

    assert found == pytest.approx(
        {
            "a/reward_mean": 2.5,
            "a/acc@1": 0.5,
            "a/pass@3": 1.0,
            "a/maj@3": 0.5,
            "b/reward_mean": 6.0,
            "b/acc@1": 0.0,
            "b/pass@3": 0.0,
            "b/maj@3": 0.0,
        }
    )


def test_without_answers_there_is_no_vote_and_without_correctness_no_share() -> None:
    found = summarise(scores([0.0, 1.0], [0.0, 1.0], term="mine/acc"), ["a"], 2)
    assert found == {"a/reward_mean": 0.5, "a/acc@1": 0.5, "a/pass@2": 1.0}
    assert summarise(scores([0.0, 1.0]), ["a"], 2) == {"a/reward_mean": 0.5}


def test_a_function_may_call_a_response_partly_right() -> None:
    found = summarise(
        scores([0.0] * 4, [0.5, 0.25, 0.0, 0.75], ["1", "2", "3", "4"], "mine/acc"), ["a", "a"], 2
    )
    assert found == {"a/reward_mean": 0.0, "a/acc@1": 0.375, "a/pass@2": 0.5, "a/maj@2": 0.0}


def test_responses_that_no_term_judges_count_in_no_share_and_are_counted() -> None:
    nan = math.nan
    total = [1.0, 2.0, 3.0, 4.0, 3e38, 3e38]
    found = summarise(
        scores(total, [1.0, nan, nan, nan, 0.0, 0.0], ["1", "2", "3", "4", "5", "6"]),
        ["a", "a", "b"],
        2,
    )

    assert found == {
        "a/reward_mean": 2.5,
        "a/acc_unknown": 3.0,
        "a/acc@1": 1.0,
        "a/pass@2": 1.0,  # the second prompt has no response of which anything is known
        "a/maj@2": 1.0,
        "b/reward_mean": pytest.approx(3e38),
        "b/acc@1": 0.0,
        "b/pass@2": 0.0,
        "b/maj@2": 0.0,
    }

    assert summarise(scores([1.0], [nan]), ["a"], 1) == {"a/reward_mean": 1.0, "a/acc_unknown": 1.0}


def test_errors_are_those_of_the_prompts() -> None:
    right = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, math.nan] * 2 + [math.nan] * 4
    rewards = [0.0] * 16 + [0.0, 1.0, 1.0, 1.0]
    sources = ["a"] * 8 + ["b", "c"]
    found = prompt_errors("val", scores(rewards, right), sources, 2)
    # Of a the prompts have 0.5, 1, 0 and 0, twice. Of the others nothing is right or wrong; one
    # reward of 0.5 tells no error, and one of 1 is a share.
    spread = (2 * (0.125**2 + 0.625**2 + 2 * 0.375**2) / 7) ** 0.5
    share = 3 / 5
    assert found == {
        "se/val/a/acc@1": pytest.approx(spread / 8**0.5),
        "se/val/c/reward_mean": pytest.approx((share * (1 - share)) ** 0.5),
    }
    found = prompt_errors("test_sampled", scores([1.0, 3.0] * 4 + [7.0]), ["a"] * 8 + ["b"], 1)
    assert found == {"se/test_sampled/a/reward_mean": pytest.approx((8 / 7 / 8) ** 0.5)}


def test_scores_must_fit_the_prompts() -> None:
    with pytest.raises(AssertionError, match="3 scores of 2 prompts x 2"):
        summarise(scores([0.0, 1.0, 2.0]), ["a", "a"], 2)


@pytest.mark.parametrize(
    ("answers", "right", "wins"),
    [
        (["7", "8", "8"], [True, False, False], False),
        (["7", "8", "7"], [True, False, True], True),
        (["7", "8", "8", "7"], [True, False, False, True], True),  # in a tie the first drawn wins
        (["8", "7", "7", "8"], [False, True, True, False], False),
        ([None, None, "7"], [False, False, True], True),  # a response without an answer has no vote
        ([None, None], [False, False], False),
        ([None], [True], False),
        (["", "", "7"], [False, False, True], False),  # an empty answer is one
    ],
)
def test_majority(answers: list[str | None], right: list[bool], wins: bool) -> None:
    assert majority(answers, right) is wins


def test_names_of_the_metrics_of_held_out_prompts() -> None:
    greedy = {"a/reward_mean": 1.0, "a/acc@1": 0.5}
    assert held_out_metrics("val", greedy, {}) == {"val/a/reward_mean": 1.0, "val/a/acc@1": 0.5}
    sampled = {"a/acc@1": 0.25, "a/pass@8": 0.75, "a/maj@8": 0.5}
    assert held_out_metrics("test", greedy, sampled) == {
        "test/a/reward_mean": 1.0,
        "test/a/acc@1": 0.5,
        "test_sampled/a/acc@1": 0.25,
        "test/a/pass@8": 0.75,
        "test/a/maj@8": 0.5,
    }


def test_the_answers_are_those_of_the_term_that_tells() -> None:
    assert _correctness_column(["bonus", "bonus/acc", "gsm8k"]) == "bonus/acc"
    assert _correctness_column(["bonus", "format"]) is None

    # Three ranks hold the rows 0 3, 1 4 and 2; the second found no answer at all.
    parts: list[dict[str, list[str | None]]] = [
        {"mine": ["a", "d"], "gsm8k": ["1", "4"]},
        {},
        {"mine": ["c"]},
    ]
    owners = [0, 1, 2, 0, 1]
    assert _join_answers(parts, "mine/acc", owners) == ["a", None, "c", "d", None]
    assert _join_answers(parts, "gsm8k", owners) == ["1", None, None, "4", None]
    assert _join_answers(parts, None, owners) is None
    assert _join_answers([{}, {}], "gsm8k", owners) is None


def test_answers_go_with_their_rows() -> None:
    one = scores([1.0, 2.0], [0.0, 1.0], ["a", None])
    two = scores([3.0], [1.0], ["c"])
    assert one.select([1, 0]).answers == [None, "a"]
    assert Scores.join([one, two]).answers == ["a", None, "c"]
    assert Scores.join([one, scores([3.0], [1.0])]).answers is None
    assert scores([1.0]).select([0]).answers is None
    assert math.isnan(Scores.join([one, scores([3.0])]).terms["gsm8k"][2])
