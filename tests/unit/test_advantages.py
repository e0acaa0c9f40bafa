"""Generalised advantage estimation against published numbers and against its definition as a double sum."""

from typing import get_args

import pytest
import torch

from mrlhf.rl.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator, gae


def _slow_gae(rewards, values, mask, gamma, lam):
    """A_t = sum over later valid tokens of (gamma lam)^l delta; masked-out positions are cut out of the sequence."""
    advantages = torch.zeros_like(values)
    for row in range(len(mask)):
        valid = [t for t in range(mask.shape[1]) if mask[row, t]]
        r = [rewards[row, t].item() for t in valid]
        v = [values[row, t].item() for t in valid] + [0.0]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(valid))]
        for i, t in enumerate(valid):
            advantages[row, t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(valid)))
    return advantages


def test_worked_example():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.2, 0.3, 0.4, 0.5]])
    mask = torch.tensor([[False, False, True, True]])
    advantages, returns = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 0.56525, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.0, 0.96525, 1.0]]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_equals_the_double_sum_under_any_mask(gamma, lam):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    values = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    mask = torch.rand(5, 8, generator=generator) < 0.6  # holes in the middle, too
    mask[0] = True
    mask[1] = False
    mask[2] = torch.arange(8) < 3
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, _slow_gae(rewards, values, mask, gamma, lam))
    torch.testing.assert_close(returns[mask], (advantages + values)[mask])
    assert advantages[~mask].abs().sum() == returns[~mask].abs().sum() == 0


def test_without_discount_the_return_is_the_reward_still_to_come():
    rewards = torch.tensor([[-0.25, 0.5, 1.0]])
    values = torch.tensor([[9.0, -4.0, 0.5]])
    _, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.25, 1.5, 1.0]]))


def test_what_stands_in_padding_does_not_matter():
    mask = torch.tensor([[True, True, False, False]])
    rewards = torch.tensor([[0.0, 1.0, float("nan"), 7.0]])
    values = torch.tensor([[0.5, 0.25, float("inf"), float("nan")]])
    padded = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    cut = gae(rewards[:, :2], values[:, :2], mask[:, :2], gamma=0.9, lam=0.8)
    for long, short in zip(padded, cut, strict=True):
        assert long[:, :2].equal(short)
        assert long[:, 2:].tolist() == [[0.0, 0.0]]


def test_each_named_estimator_exists():
    assert set(ADVANTAGE_ESTIMATORS) == set(get_args(AdvantageEstimator)) == {"gae"}
