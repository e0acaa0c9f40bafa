"""Masked sums, moments and whitening against torch's own reductions over the kept entries alone."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.masking import (
    Moments,
    local_moments,
    masked_mean,
    masked_sum,
    merge_moments,
    selected,
    whiten,
)
from tests.masked_batches import masked_batches
from tests.masks import kept_rows

X = torch.tensor([[1.0, 2.0, 6.0], [4.0, float("nan"), float("inf")]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_sum_and_mean_ignore_what_the_mask_hides():
    assert masked_sum(X, MASK).item() == 13.0
    assert masked_mean(X, MASK).item() == 3.25
    assert masked_sum(X, MASK, dim=1).tolist() == [9.0, 4.0]
    assert masked_mean(X, MASK, dim=1).tolist() == [3.0, 4.0]
    assert masked_mean(X, MASK, dim=0).tolist() == [2.5, 2.0, 6.0]


def test_empty_mask_gives_zero():
    empty = torch.zeros_like(MASK)
    assert masked_mean(X, empty).item() == 0.0
    assert masked_mean(X, empty, dim=1).tolist() == [0.0, 0.0]


def test_no_gradient_reaches_hidden_positions():
    x = torch.ones(2, 3, requires_grad=True)
    masked_mean(x, MASK).backward()
    assert x.grad.tolist() == [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]


def test_masks_that_are_not_bool_or_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match="bool"):
        masked_sum(X, MASK.long())
    with pytest.raises(AssertionError, match="does not fit"):
        masked_sum(X, MASK[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_selected_entries_are_those_of_torch(dtype):
    x = torch.tensor([[3, 0, 2], [0, 1, 5]]).to(dtype)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    assert torch.equal(selected(x, mask), x[mask])
    assert selected(x, ~mask & mask).numel() == 0


@pytest.mark.parametrize("count", [0, 1])
def test_variance_of_fewer_than_two_is_zero_and_whitening_stays_finite(count):
    x = torch.tensor([[5.0, 7.0]])
    mask = torch.tensor([[count > 0, False]])
    moments = local_moments(x, mask)
    assert (moments.count, moments.variance) == (count, 0.0)
    assert whiten(x, mask, moments).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("cuts", [(40,), (0, 1, 39), (7, 13, 20), (1,) * 40])
def test_merged_moments_are_those_of_the_whole_also_far_from_zero(cuts, offset):
    x = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + offset
    mask = torch.rand(40, generator=torch.Generator().manual_seed(2)) < 0.7
    parts = [local_moments(a, b) for a, b in zip(x.split(cuts), mask.split(cuts), strict=True)]
    gathered = torch.stack([part.to_tensor() for part in parts])
    merged = merge_moments(Moments.from_tensor(row) for row in gathered)
    whole = x[mask]
    assert merged.count == whole.numel()
    assert merged.mean == pytest.approx(whole.mean().item(), rel=1e-14, abs=1e-14)
    assert merged.variance == pytest.approx(whole.var().item(), rel=1e-9)


def test_merging_nothing_gives_nothing():
    assert merge_moments([]) == Moments(0, 0.0, 0.0)
    assert merge_moments([Moments(0, 0.0, 0.0), Moments(2, 3.0, 8.0)]) == Moments(2, 3.0, 8.0)


def test_whitening_literal_numbers_and_kept_mean():
    # 1, 2, 6, 4: mean 3.25, squares 5.0625 + 1.5625 + 7.5625 + .5625 = 14.75, variance 14.75 / 3.
    scale = 1 / math.sqrt(14.75 / 3 + 1e-8)
    shifted = whiten(X, MASK, local_moments(X, MASK))
    torch.testing.assert_close(shifted[MASK], torch.tensor([-2.25, -1.25, 2.75, 0.75]) * scale)
    kept = whiten(X, MASK, local_moments(X, MASK), shift_mean=False)
    torch.testing.assert_close(kept[MASK], torch.tensor([-2.25, -1.25, 2.75, 0.75]) * scale + 3.25)
    assert kept[~MASK].tolist() == [0.0, 0.0]


@given(batch=masked_batches())
@settings(max_examples=60)
def test_sums_moments_and_whitening_equal_the_slow_loop_under_any_mask(batch):
    rows = kept_rows(batch.rewards, batch.mask)
    kept = [x for row in rows for x in row]
    assert masked_sum(batch.rewards, batch.mask).item() == sum(kept)
    assert masked_mean(batch.rewards, batch.mask).item() == pytest.approx(
        sum(kept) / max(1, len(kept)), abs=1e-15
    )
    assert masked_sum(batch.rewards, batch.mask, dim=1).tolist() == [sum(row) for row in rows]

    moments = local_moments(batch.rewards, batch.mask)
    mean = statistics.fmean(kept) if kept else 0.0
    variance = statistics.variance(kept) if len(kept) > 1 else 0.0
    assert moments.count == len(kept)
    assert moments.mean == pytest.approx(mean, abs=1e-15)
    assert moments.variance == pytest.approx(variance, rel=1e-12)
    for shift_mean, put_back in ((True, 0.0), (False, mean)):
        white = whiten(batch.rewards, batch.mask, moments, shift_mean)
        expected = [(x - mean) / math.sqrt(variance + 1e-8) + put_back for x in kept]
        # A spread of 0 divides the rounding of the mean by 1e-4.
        assert white[batch.mask].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-11)
        assert not white[~batch.mask].any()


@given(batch=masked_batches(), cut=st.integers(0, 6))
@settings(max_examples=60)
def test_moments_merge_in_any_order_to_those_of_the_whole(batch, cut):
    parts = [
        local_moments(batch.values[rows], batch.mask[rows])
        for rows in (slice(0, cut), slice(cut, None))
    ]
    whole = local_moments(batch.values, batch.mask)
    for order in (parts, parts[::-1], [Moments(0, 0.0, 0.0), *parts]):
        merged = merge_moments(order)
        assert merged.count == whole.count
        assert merged.mean == pytest.approx(whole.mean, abs=1e-14)
        assert merged.variance == pytest.approx(whole.variance, abs=1e-13)
