"""Losses against hand-computed numbers and slow loops.

For every aggregation the sums of parts are compared with the whole.
"""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.losses import aggregation_count, value_loss
from mrlhf.rl.names import LossAggMode
from tests.aggregation import aggregate
from tests.masks import masks

MODES = get_args(LossAggMode)
LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


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
        sums = [
            aggregate(_padded(x.square(), 2 * i), _padded(m, 2 * i), mode, 7.0)
            for i, (x, m) in enumerate(parts)
        ]
        torch.testing.assert_close(sum(sums) / count, loss)
        torch.testing.assert_close(torch.autograd.grad(sum(sums) / count, whole)[0], gradient)


def _padded(x, width):
    return torch.nn.functional.pad(x, (0, width))


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mini_batch_has_loss_zero(mode):
    nothing = torch.zeros_like(MASK)
    assert aggregate(LOSS, nothing, mode, 8).item() / aggregation_count(0, 0, mode) == 0.0


@settings(max_examples=60)
@given(mask=masks(), seed=st.integers(0, 1000), mode=st.sampled_from(MODES))
def test_aggregate_equals_the_slow_loop_and_ignores_padding(mask, seed, mode):
    per_token = torch.randn(
        mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )

    total = 0.0
    for losses, kept in zip(per_token.tolist(), mask.tolist(), strict=True):
        counted = [loss for loss, keep in zip(losses, kept, strict=True) if keep]
        if mode == "seq-mean-token-mean":
            total += sum(counted) / max(len(counted), 1)
        else:
            total += sum(counted) / (7.0 if mode == "seq-mean-token-sum-norm" else 1.0)

    assert aggregate(per_token, mask, mode, 7.0).item() == pytest.approx(
        total, rel=1e-12, abs=1e-12
    )
    holes = per_token.masked_fill(~mask, math.nan)
    assert aggregate(holes, mask, mode, 7.0).item() == pytest.approx(total, rel=1e-12, abs=1e-12)


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
    torch.testing.assert_close(
        loss.per_token.mean(), 0.5 * torch.nn.functional.mse_loss(values, returns)
    )
    assert not loss.clipped.any()
