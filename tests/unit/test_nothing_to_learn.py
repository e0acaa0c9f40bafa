"""A step that teaches nothing is told once, in one line, by one rank; other steps are not."""

import logging

import pytest
import torch

from mrlhf.trainers.nothing_to_learn import NothingToLearn

PROMPTS = torch.tensor([0, 0, 1, 1])
REJECTED = "rollout_corr/rollout_rs_masked_fraction"
WEIGHT = "rollout_corr/rollout_is_mean"


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("estimator", "scores", "told"),
    [
        ("gae", [0.5, 0.5, 0.5, 0.5], "all 4 responses of a step have the score 0.5"),
        ("grpo", [0.0, 0.0, 0.0, 0.0], "all 4 responses of a step have the score 0"),
        ("grpo", [1.0, 1.0, 0.0, 0.0], "the responses of a step to each prompt have equal scores"),
        ("rloo", [1.0, 1.0, 0.0, 0.0], "the responses of a step to each prompt have equal scores"),
        ("gae", [1.0, 1.0, 0.0, 0.0], None),
        ("grpo", [1.0, 1.0, 0.0, 1.0], None),
        ("gdpo", [[1.0, 1.0, 0.0, 0.0], [2.0] * 4], "the responses of a step to each prompt"),
        ("gdpo", [[1.0] * 4, [2.0] * 4], "all 4 responses of a step have the score 1, 2"),
        ("gdpo", [[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 2.0, 2.0]], None),
    ],
)
def test_equal_scores(lines, estimator, scores, told):
    warnings = NothingToLearn(estimator, is_main_rank=True)
    for _ in range(3):
        warnings.from_scores(torch.tensor(scores), PROMPTS)
    if told is None:
        assert lines() == []
    else:
        (line,) = lines()
        assert line.startswith(told) and line.endswith("(this is said once)")
        assert "\n" not in line


def test_one_response_or_one_a_prompt_has_nothing_to_be_compared_with(lines):
    warnings = NothingToLearn("rloo", is_main_rank=True)
    warnings.from_scores(torch.tensor([0.5]), torch.tensor([0]))
    warnings.from_scores(torch.tensor([0.5, 1.0]), torch.tensor([0, 1]))
    assert lines() == []


def test_a_correction_that_leaves_nothing(lines):
    warnings = NothingToLearn("grpo", is_main_rank=True)
    for metrics in ({}, {REJECTED: 0.99, WEIGHT: 0.1}, {REJECTED: 1.0}, {REJECTED: 1.0}):
        warnings.from_correction(metrics)
    (line,) = lines()
    assert "rollout_correction.rollout_rs has rejected every token of a step" in line
    warnings.from_correction({WEIGHT: 0.0})
    assert "rollout_is gives every token of a step the weight 0" in lines()[1]


def test_other_ranks_are_silent(lines):
    NothingToLearn("gae", is_main_rank=False).from_scores(torch.ones(4), PROMPTS)
    assert lines() == []
