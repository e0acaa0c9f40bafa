"""Losses against hand-computed numbers and slow loops; sums of parts against the whole for every aggregation."""

import math
from typing import get_args

import pytest
import torch

from mrlhf.rl.losses import LossAggMode, aggregate, aggregation_count, ppo_policy_loss, value_loss

MODES = get_args(LossAggMode)
LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


def _slow_policy_loss(logprob, old, advantage, low, high, c):
    ratio = math.exp(min(max(logprob - old, -20), 20))
    first, second = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    loss = max(first, second)
    dual = advantage < 0 and loss > -advantage * c
    return (-advantage * c if dual else loss), second > first, dual


@pytest.mark.parametrize(
    ("mode", "total", "count"),
    [
        ("token-mean", 10.0, 4),
        ("token-sum", 10.0, 1),
        ("seq-mean-token-sum", 10.0, 2),
        ("seq-mean-token-sum-norm", 10.0 / 8, 2),
        ("seq-mean-token-mean", 2.0 + 4.0, 2),
    ],
)
def test_literal_sums_and_counts(mode, total, count):
    assert aggregate(LOSS, MASK, mode, loss_scale_factor=8).item() == total
    assert aggregation_count(4, 2, mode) == count


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_do_not_depend_on_the_split(mode):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    mask[2] = False  # a sequence of which nothing is left
    whole = torch.randn(6, 5, dtype=torch.float64, generator=generator).requires_grad_()
    count = aggregation_count(int(mask.sum()), 6, mode)
    loss = aggregate(whole.square(), mask, mode, 7.0) / count
    (gradient,) = torch.autograd.grad(loss, whole)
    for split in ([3, 3], [1, 5], [1, 1, 4]):
        parts = zip(whole.split(split), mask.split(split), strict=True)
        # Each part may also be padded to its own width.
        sums = [aggregate(_padded(x.square(), 2 * i), _padded(m, 2 * i), mode, 7.0) for i, (x, m) in enumerate(parts)]
        torch.testing.assert_close(sum(sums) / count, loss)
        torch.testing.assert_close(torch.autograd.grad(sum(sums) / count, whole)[0], gradient)


def _padded(x, width):
    return torch.nn.functional.pad(x, (0, width))


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mini_batch_has_loss_zero(mode):
    nothing = torch.zeros_like(MASK)
    assert aggregate(LOSS, nothing, mode, 8).item() / aggregation_count(0, 0, mode) == 0.0


def test_ratio_and_clipping_of_the_worked_example():
    logprob, old = torch.tensor([-1.5, -1.5, 0.0]), torch.tensor([-2.0, -2.0, -2.0])
    loss = ppo_policy_loss(logprob, old, torch.tensor([0.5, -0.5, -0.5]), 0.2, 0.2, 3.0)
    torch.testing.assert_close(loss.ratio, torch.tensor([1.6487213, 1.6487213, 7.3890561]))
    torch.testing.assert_close(loss.per_token, torch.tensor([-0.6, 0.8243606, 1.5]))
    assert loss.clipped.tolist() == [True, False, False]
    assert loss.clipped_lower.tolist() == [False, False, True]
    assert loss.approx_kl.tolist() == [-0.5, -0.5, -2.0]


def test_first_update_has_ratio_one_and_the_surrogate_objective():
    advantages = torch.tensor([[0.13, 0.10, 0.08, 0.05, 0.03, 0.05]])
    logprob = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]], requires_grad=True)
    loss = ppo_policy_loss(logprob, logprob.detach(), advantages, 0.2, 0.2, 3.0)
    mean = aggregate(loss.per_token, torch.ones(1, 6, dtype=torch.bool), "token-mean", 1.0) / 6
    mean.backward()
    assert mean.item() == pytest.approx(-0.44 / 6, rel=1e-6)
    torch.testing.assert_close(logprob.grad, -advantages / 6)
    assert loss.ratio.tolist() == [[1.0] * 6]
    assert not loss.clipped.any() and not loss.clipped_lower.any()


def test_policy_loss_equals_the_slow_loop():
    generator = torch.Generator().manual_seed(2)
    logprob, old, advantages = torch.randn(3, 400, dtype=torch.float64, generator=generator).unbind()
    loss = ppo_policy_loss(2 * logprob, 2 * old, advantages, 0.1, 0.3, 2.0)
    slow = [
        _slow_policy_loss(2 * a, 2 * b, c, 0.1, 0.3, 2.0)
        for a, b, c in zip(logprob.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]
    torch.testing.assert_close(loss.per_token, torch.tensor([row[0] for row in slow], dtype=torch.float64))
    assert loss.clipped.tolist() == [row[1] for row in slow]
    assert loss.clipped_lower.tolist() == [row[2] for row in slow]
    assert min(loss.clipped.sum(), loss.clipped_lower.sum()) > 10  # the example reaches each branch


def test_clipped_tokens_pass_no_gradient():
    logprob = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    old = torch.tensor([-1.0, 1.0, -2.0])  # ratios e, 1/e, e^2
    loss = ppo_policy_loss(logprob, old, torch.tensor([1.0, -1.0, -1.0]), 0.2, 0.2, 3.0)
    loss.per_token.sum().backward()
    assert logprob.grad.tolist() == [0.0, 0.0, 0.0]


def test_huge_log_ratios_stay_finite():
    loss = ppo_policy_loss(torch.tensor([0.0]), torch.tensor([-1000.0]), torch.tensor([-1.0]), 0.2, 0.2, 3.0)
    assert loss.per_token.item() == 3.0
    assert loss.ratio.item() == pytest.approx(math.exp(20), rel=1e-6)


def test_a_dual_clip_inside_the_trusted_region_is_refused():
    with pytest.raises(AssertionError, match="clip_c"):
        ppo_policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.2, 0.2, 1.0)


def test_value_loss_takes_the_worse_of_both_predictions():
    values = torch.tensor([1.0, 2.0, 0.0, 0.3], requires_grad=True)
    old = torch.tensor([0.0, 0.0, 0.0, 0.0])
    returns = torch.tensor([1.0, 1.5, 2.0, 1.0])
    loss = value_loss(values, old, returns, clip_range=0.5)
    # (1-1)^2 < (.5-1)^2 | (2-1.5)^2 < (.5-1.5)^2 | (0-2)^2 both | (.3-1)^2 both
    torch.testing.assert_close(loss.per_token, torch.tensor([0.125, 0.5, 2.0, 0.245]))
    assert loss.clipped.tolist() == [True, True, False, False]
    loss.per_token.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.0, -2.0, -0.7]))


def test_value_loss_with_a_wide_range_is_half_the_squared_error():
    generator = torch.Generator().manual_seed(3)
    values, old, returns = torch.randn(3, 50, generator=generator).unbind()
    loss = value_loss(values, old, returns, clip_range=100.0)
    torch.testing.assert_close(loss.per_token.mean(), 0.5 * torch.nn.functional.mse_loss(values, returns))
    assert not loss.clipped.any()
