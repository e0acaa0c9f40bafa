"""Token rewards, penalties and normalised scores against published numbers and slow loops."""

import statistics

import pytest
import torch
from hypothesis import given, settings

from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.masking import Moments
from mrlhf.rl.shaping import (
    missing_eos_penalty,
    normalise_by_prompt,
    normalise_scores,
    overlong_penalty,
    token_rewards,
)
from tests.masked_batches import masked_batches

OLD = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]])
REF = torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]])


def _slow_token_rewards(scores, mask, kl, kl_coef, placement):
    rewards = torch.zeros_like(kl)
    for row in range(len(mask)):
        valid = [t for t in range(mask.shape[1]) if mask[row, t]]
        for t in valid:
            rewards[row, t if placement == "token" else valid[-1]] -= kl_coef * kl[row, t]
        if valid:
            rewards[row, valid[-1]] += scores[row]
    return rewards


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("token", [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999]),
        ("terminal", [0.0] * 5 + [0.9986]),
    ],
)
def test_worked_example(placement, expected):
    mask = torch.ones(1, 6, dtype=torch.bool)
    rewards = token_rewards(torch.tensor([1.0]), mask, kl_penalty(OLD, REF, "k1"), 0.01, placement)
    torch.testing.assert_close(rewards, torch.tensor([expected]))


@pytest.mark.parametrize("placement", ["token", "terminal"])
def test_without_kl_the_score_stands_alone_on_the_last_valid_token(placement):
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    rewards = token_rewards(torch.tensor([2.0, -1.0, 5.0]), mask, None, 0.5, placement)
    assert rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]


@given(batch=masked_batches())
@settings(max_examples=60)
def test_token_rewards_equal_the_slow_loop_under_every_kind_of_mask(batch):
    for placement in ("token", "terminal"):
        rewards = token_rewards(batch.greedy_scores, batch.mask, batch.rewards, 0.25, placement)
        expected = _slow_token_rewards(
            batch.greedy_scores, batch.mask, batch.rewards, 0.25, placement
        )
        assert rewards.equal(expected)


def test_overlong_penalty_literal_numbers():
    # Free up to 16 tokens, then a quarter of the factor a token.
    lengths = torch.tensor([0, 15, 16, 17, 18, 20])
    assert overlong_penalty(lengths, 20, 4, 1.0).tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -1.0]
    assert overlong_penalty(lengths, 20, 4, 2.0).tolist() == [0.0, 0.0, 0.0, -0.5, -1.0, -2.0]
    assert overlong_penalty(lengths, 20, 20, 1.0).tolist() == pytest.approx(
        [0.0, -0.75, -0.8, -0.85, -0.9, -1.0]
    )
    assert overlong_penalty(lengths, 20, 4, 0.0).tolist() == [0.0] * 6
    # As published: a limit of 20480 tokens of which the last 4096 are the buffer.
    assert overlong_penalty(torch.tensor([16384, 18432, 20480]), 20480, 4096, 1.0).tolist() == [
        0.0,
        -0.5,
        -1.0,
    ]


@pytest.mark.parametrize("buffer", [0, 21])
def test_an_overlong_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(AssertionError, match=f"buffer of {buffer} tokens does not fit into 20"):
        overlong_penalty(torch.tensor([3]), 20, buffer, 1.0)


def test_missing_eos_penalty_literal_numbers():
    stopped = torch.tensor([True, False, True, False])
    assert missing_eos_penalty(stopped, 1.5).tolist() == [0.0, -1.5, 0.0, -1.5]
    assert missing_eos_penalty(stopped, 0.0).tolist() == [0.0] * 4
    with pytest.raises(AssertionError, match=r"-1\.0 would reward"):
        missing_eos_penalty(stopped, -1.0)
    with pytest.raises(AssertionError, match="bool"):
        missing_eos_penalty(stopped.long(), 1.0)


def test_normalised_scores_literal_numbers():
    moments = Moments(count=5, mean=2.0, centred_squares=36.0)  # variance 9
    scores = torch.tensor([5.0, 2.0, -4.0], dtype=torch.float64)
    expected = torch.tensor(
        [0.99999966667, 0.0, -1.99999933333], dtype=torch.float64
    )  # 3 and -6 over 3 + 1e-6
    torch.testing.assert_close(normalise_scores(scores, moments), expected, rtol=0, atol=1e-10)
    assert normalise_scores(scores.float(), moments).dtype == torch.float32


def test_normalised_scores_of_a_set_without_spread_stay_finite():
    assert normalise_scores(torch.tensor([2.0]), Moments(1, 2.0, 0.0)).tolist() == [0.0]
    assert normalise_scores(torch.tensor([0.25]), Moments(0, 0.0, 0.0)).item() == pytest.approx(
        250000
    )


def test_scores_normalised_in_groups_literal_numbers():
    # Mean 3, variance 7 in prompt group 7; alone in 3; no spread in 0.
    scores = torch.tensor([1.0, 5.0, 2.0, 4.0, 6.0, 4.0], dtype=torch.float64)
    prompts = torch.tensor([7, 3, 7, 0, 7, 0])
    normalised = normalise_by_prompt(scores, prompts)
    expected = [-0.75592866030, 4.99999500001, -0.37796433015, 0.0, 1.13389299046, 0.0]
    torch.testing.assert_close(
        normalised, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10
    )
    assert normalise_by_prompt(scores.float(), prompts).dtype == torch.float32


@given(batch=masked_batches())
@settings(max_examples=60)
def test_scores_normalised_in_groups_equal_the_slow_loop(batch):
    scores = batch.greedy_scores.tolist()
    prompts = batch.prompt_groups.tolist()
    expected = []
    for score, prompt in zip(scores, prompts, strict=True):
        members = [other for other, its in zip(scores, prompts, strict=True) if its == prompt]
        mean = statistics.fmean(members) if len(members) > 1 else 0.0
        std = statistics.stdev(members) if len(members) > 1 else 1.0
        expected.append((score - mean) / (std + 1e-6))

    normalised = normalise_by_prompt(batch.greedy_scores, batch.prompt_groups)
    torch.testing.assert_close(
        normalised, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
