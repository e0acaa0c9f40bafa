"""Token rewards against published numbers and a slow loop."""

import pytest
import torch

from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.shaping import token_rewards

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
    [("token", [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999]), ("terminal", [0.0] * 5 + [0.9986])],
)
def test_worked_example(placement, expected):
    mask = torch.ones(1, 6, dtype=torch.bool)
    rewards = token_rewards(torch.tensor([1.0]), mask, kl_penalty(OLD, REF, "k1"), 0.01, placement)
    torch.testing.assert_close(rewards, torch.tensor([expected]))


def test_terminal_reward_of_the_worked_example():
    mask = torch.tensor([[True, True, True, False]])
    kl = torch.tensor([[3.0, 4.0, 1.0, float("nan")]])
    rewards = token_rewards(torch.tensor([3.5]), mask, kl, 0.1, "terminal")
    torch.testing.assert_close(rewards, torch.tensor([[0.0, 0.0, 2.7, 0.0]]))


@pytest.mark.parametrize("placement", ["token", "terminal"])
def test_equals_the_slow_loop_under_any_mask(placement):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, dtype=torch.float64, generator=generator)
    kl = torch.randn(6, 7, dtype=torch.float64, generator=generator)
    mask = torch.rand(6, 7, generator=generator) < 0.5
    mask[3] = False
    rewards = token_rewards(scores, mask, kl, 0.3, placement)
    torch.testing.assert_close(rewards, _slow_token_rewards(scores, mask, kl, 0.3, placement))
    assert rewards[3].tolist() == [0.0] * 7
    totals = torch.where(mask.any(dim=1), scores - 0.3 * (kl * mask).sum(dim=1), 0)
    torch.testing.assert_close(rewards.sum(dim=1), totals)


@pytest.mark.parametrize("placement", ["token", "terminal"])
def test_without_kl_the_score_stands_alone_on_the_last_valid_token(placement):
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    rewards = token_rewards(torch.tensor([2.0, -1.0, 5.0]), mask, None, 0.5, placement)
    assert rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
