"""Rejection and importance weights against hand-computed numbers and a slow loop."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.correction import Correction, Criterion, correct, geometric_mean_weights
from mrlhf.rl.names import Statistic
from tests.masks import kept_rows, masks
from tests.oracle import plain_correction

STATISTICS = get_args(Statistic)
# The first row's two tokens are .5 and -.25; the second row has none.
LOG_RATIO = torch.tensor([[0.5, -0.25, math.nan], [math.nan, 7.0, -7.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [False, False, False]])


def _rejecting(*criteria):
    return Correction(level=None, lower=None, upper=2.0, normalise=False, criteria=criteria)


def _weighing(level, upper, lower=None, normalise=False, criteria=()):
    return Correction(level=level, lower=lower, upper=upper, normalise=normalise, criteria=criteria)


@pytest.mark.parametrize(
    ("statistic", "values"),  # of the two tokens, or of the sequence
    [
        ("seq_sum_k2", [0.15625]),
        ("seq_sum_k3", [0.1775221]),
        ("seq_mean_k2", [0.078125]),
        ("seq_mean_k3", [0.0887610]),
        ("seq_max_k2", [0.125]),
        ("seq_max_k3", [0.1487213]),
        ("token_k2", [0.125, 0.03125]),
        ("token_k3", [0.1487213, 0.0288008]),
    ],
)
def test_what_has_a_divergence_above_the_bound_goes(statistic, values):
    for bound in (value + part for value in values for part in (1e-6, -1e-6)):
        corrected = correct(LOG_RATIO, MASK, _rejecting(Criterion(statistic, None, bound)))
        kept = [value <= bound for value in values]
        assert corrected.kept.tolist() == [[kept[0], kept[-1], False], [False] * 3]
        assert corrected.weights is None and corrected.raw is None


@pytest.mark.parametrize(
    ("statistic", "exponents"),  # of -.5 and .25, the logarithm of engine over trainer
    [("seq_sum_k1", [-0.25]), ("seq_mean_k1", [-0.125]), ("token_k1", [-0.5, 0.25])],
)
def test_k1_bounds_the_ratio_of_engine_to_trainer(statistic, exponents):
    low = math.exp(exponents[0])
    high = math.exp(exponents[-1])
    for sign in (1, -1):
        for lower, upper in (
            (low - 1e-6, high + 1e-6),
            (low + 1e-6, high + 1e-6),
            (low - 1e-6, high - 1e-6),
            (low + 1e-6, high - 1e-6),
        ):
            kept = [lower <= math.exp(exponent) <= upper for exponent in exponents]
            # With the opposite log-ratios, the reciprocal bounds.
            bounds = (lower, upper) if sign == 1 else (1 / upper, 1 / lower)
            corrected = correct(sign * LOG_RATIO, MASK, _rejecting(Criterion(statistic, *bounds)))
            assert corrected.kept.tolist() == [[kept[0], kept[-1], False], [False] * 3]


def test_all_criteria_must_hold():
    log_ratio = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, -0.5], [0.4, 0.4, 0.4], [0.0, 0.1, 0.0]])
    mask = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [False, True, True]])
    assert torch.equal(correct(log_ratio, mask, _rejecting()).kept, mask)
    token = Criterion("token_k1", 1 / 1.6, 1.6)
    sequence = Criterion("seq_sum_k2", None, 0.2)

    assert correct(log_ratio, mask, _rejecting(token)).kept.tolist() == [
        [False, True, True],  # .5 > log 1.6 = .47
        [True, True, False],
        [True, True, True],
        [False, True, True],
    ]
    both = correct(log_ratio, mask, _rejecting(token, sequence)).kept
    assert both.tolist() == [
        [False, True, True],
        [True, True, False],
        [False] * 3,
        [False, True, True],
    ]
    assert torch.equal(both, correct(log_ratio, mask, _rejecting(sequence, token)).kept)


def test_divergences_are_those_of_log_ratios_cut_to_twenty():
    log_ratio = torch.tensor([[100.0, -math.inf]])
    mask = torch.tensor([[True, True]])
    for statistic, value in (
        ("token_k2", 200.0),
        ("seq_sum_k2", 400.0),
        ("seq_mean_k2", 200.0),
        ("seq_max_k2", 200.0),
    ):
        assert correct(
            log_ratio, mask, _rejecting(Criterion(statistic, None, value + 1))
        ).kept.all()
        assert not correct(
            log_ratio, mask, _rejecting(Criterion(statistic, None, value - 1))
        ).kept.any()


@pytest.mark.parametrize(("statistic", "lower"), [("token_k1", None), ("seq_sum_k3", 0.5)])
def test_bounds_that_a_statistic_does_not_have_are_refused(statistic, lower):
    with pytest.raises(AssertionError, match="lower bound"):
        Criterion(statistic, lower, 2.0)


LN2 = math.log(2.0)


TOKENS = [[LN2, -LN2, 2 * LN2, 0.0, -3 * LN2]]
SEQUENCES = [[LN2, LN2, -9.0], [-LN2, 0.0, -2 * LN2], [5.0, 5.0, 5.0]]
ALL = [[True] * 5]
SOME = [[True, True, False], [True] * 3, [False] * 3]
NONE = [0.0] * 3


@pytest.mark.parametrize(
    ("log_ratio", "mask", "correction", "weights"),
    [
        (TOKENS, ALL, _weighing("token", 3.0), [[2.0, 0.5, 3.0, 1.0, 0.125]]),
        (TOKENS, ALL, _weighing("token", 3.0, lower=0.3), [[2.0, 0.5, 0.0, 1.0, 0.0]]),
        # A band includes its ends.
        ([[0.0]], [[True]], _weighing("token", 2.0, lower=1.0), [[1.0]]),
        ([[0.0]], [[True]], _weighing("token", 1.0, lower=0.5), [[1.0]]),
        # Of a sequence the product stands on every token.
        (SEQUENCES, SOME, _weighing("sequence", 5.0), [[4.0, 4.0, 0.0], [0.125] * 3, NONE]),
        (SEQUENCES, SOME, _weighing("sequence", 3.0), [[3.0, 3.0, 0.0], [0.125] * 3, NONE]),
        (SEQUENCES, SOME, _weighing("sequence", 5.0, lower=0.2), [[4.0, 4.0, 0.0], NONE, NONE]),
        # Truncated to 3, .5, 1: their mean over tokens is 1.5.
        (
            [[2 * LN2, -LN2, 0.0, 9.0], [9.0] * 4],
            [[True, True, True, False], [False] * 4],
            _weighing("token", 3.0, normalise=True),
            [[2.0, 1 / 3, 2 / 3, 0.0], [0.0] * 4],
        ),
        # Truncated to 3 and .5: their mean over sequences with a token is 1.75, however long.
        (
            [[LN2, LN2, 0.0], [-LN2, 9.0, 9.0], [9.0] * 3],
            [[True] * 3, [True, False, False], [False] * 3],
            _weighing("sequence", 3.0, normalise=True),
            [[3 / 1.75] * 3, [0.5 / 1.75, 0.0, 0.0], NONE],
        ),
    ],
)
def test_weights_literal_numbers(log_ratio, mask, correction, weights):
    log_ratio = torch.tensor(log_ratio, dtype=torch.float64)
    corrected = correct(log_ratio, torch.tensor(mask), correction)
    torch.testing.assert_close(corrected.weights, torch.tensor(weights, dtype=torch.float64))
    if log_ratio.tolist() == SEQUENCES:
        assert corrected.raw[:, 0].tolist() == pytest.approx([4.0, 0.125, 0.0])


def test_rejection_changes_neither_weights_nor_their_mean():
    log_ratio = torch.tensor([[2 * LN2, -LN2, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    # Engine over trainer is 1/4, 2, 1: the first token goes.
    criteria = (Criterion("token_k1", 0.5001, 3.0),)
    for level in ("token", "sequence"):
        with_rejection = correct(
            log_ratio, mask, _weighing(level, 3.0, normalise=True, criteria=criteria)
        )
        without = correct(log_ratio, mask, _weighing(level, 3.0, normalise=True))
        assert with_rejection.kept.tolist() == [[False, True, True]] and without.kept.all()
        assert torch.equal(with_rejection.weights, without.weights)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_that_are_all_zero_stay_zero(level):
    # Normalised, and outside the band; then a batch without a token.
    log_ratio = torch.full((2, 2), 3.0)
    for mask in (torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool)):
        corrected = correct(log_ratio, mask, _weighing(level, 2.0, lower=0.5, normalise=True))
        assert corrected.weights.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_carry_no_gradient_and_stay_finite(level):
    log_ratio = torch.tensor([[1e4, -1e4], [3e4, 1.0], [math.inf, 1.0]], requires_grad=True)
    corrected = correct(log_ratio, torch.ones(3, 2, dtype=torch.bool), _weighing(level, 1e12))
    assert not corrected.weights.requires_grad and not corrected.raw.requires_grad
    assert corrected.weights.isfinite().all() and corrected.weights.max().item() == pytest.approx(
        math.exp(20)
    )


def test_geometric_mean_of_the_weights_of_a_row():
    weights = torch.tensor([[4.0, 1.0, 0.0], [0.5, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    # One weight of 0 stands for 1e-10: sqrt(.5e-10).
    expected = torch.tensor(
        [[2.0, 2.0, 0.0], [7.0710678e-6] * 2 + [0.0], [0.0] * 3], dtype=torch.float64
    )
    torch.testing.assert_close(
        geometric_mean_weights(weights, mask), expected, rtol=1e-6, atol=1e-12
    )


# ---- slow loops


def _slow_kept(criterion, row):
    """Which of the tokens of a row (their log-ratios) are kept."""
    (values,) = plain_correction.estimates(criterion.statistic, [row])
    if criterion.lower is None:
        return [value <= criterion.upper for value in values]
    return [criterion.lower <= math.exp(value) <= criterion.upper for value in values]


def _slow_weights(rows, correction):
    table = plain_correction.weights(rows, correction)
    if correction.normalise:
        counted = [w for row in table for w in (row if correction.level == "token" else row[:1])]
        mean = sum(counted) / len(counted) if counted else 0.0
        table = [[w / mean for w in row] if mean > 1e-8 else row for row in table]
    return table


def _batch(mask, seed, scale):
    drawn = scale * torch.randn(
        mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return drawn.masked_fill(~mask, math.nan), kept_rows(drawn, mask)


CRITERIA = st.sampled_from(STATISTICS).flatmap(
    lambda name: st.builds(
        Criterion,
        st.just(name),
        st.sampled_from([0.3, 0.6, 0.9]) if name.endswith("k1") else st.none(),
        st.sampled_from([1.1, 1.5, 3.0])
        if name.endswith("k1")
        else st.sampled_from([0.01, 0.1, 0.5, 2.0]),
    )
)


@settings(max_examples=200)
@given(
    mask=masks(),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 0.6, 30.0]),
    criteria=st.lists(CRITERIA, min_size=1, max_size=3),
)
def test_rejection_equals_the_slow_loop(mask, seed, scale, criteria):
    log_ratio, rows = _batch(mask, seed, scale)
    kept = correct(log_ratio, mask, _rejecting(*criteria)).kept
    assert not kept[~mask].any()
    for kept_row, mask_row, row in zip(kept, mask, rows, strict=True):
        if row:
            verdicts = zip(*(_slow_kept(criterion, row) for criterion in criteria), strict=True)
            assert kept_row[mask_row].tolist() == [all(token) for token in verdicts]


@pytest.mark.parametrize("statistic", STATISTICS)
def test_each_statistic_parts_a_random_batch(statistic):
    mask = torch.rand(30, 6, generator=torch.Generator().manual_seed(1)) < 0.8
    mask[3] = False
    log_ratio, rows = _batch(mask, 2, 0.6)
    upper = 0.5 if statistic.startswith("seq_sum") else 0.2
    if statistic.endswith("k1"):
        criterion = Criterion(statistic, 0.8, 1.25)
    else:
        criterion = Criterion(statistic, None, upper)

    kept = correct(log_ratio, mask, _rejecting(criterion)).kept
    for kept_row, mask_row, row in zip(kept, mask, rows, strict=True):
        assert kept_row[mask_row].tolist() == (_slow_kept(criterion, row) if row else [])
    assert 10 < kept.sum() < mask.sum() - 10  # the example has both


@settings(max_examples=100)
@given(
    mask=masks(),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.5, 30.0]),
    correction=st.builds(
        Correction,
        level=st.sampled_from(["token", "sequence"]),
        lower=st.sampled_from([None, 0.4, 0.8]),
        upper=st.sampled_from([1.2, 2.0, 1e9]),
        normalise=st.booleans(),
        criteria=st.just(()),
    ),
)
def test_weights_equal_the_slow_loop(mask, seed, scale, correction):
    log_ratio, rows = _batch(mask, seed, scale)
    weights = correct(log_ratio, mask, correction).weights
    assert not weights[~mask].any()
    expected = [w for row in _slow_weights(rows, correction) for w in row]
    torch.testing.assert_close(
        weights[mask], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12
    )


@settings(max_examples=60)
@given(
    mask=masks(),
    seed=st.integers(0, 1000),
    level=st.sampled_from([None, "token", "sequence"]),
    criteria=st.lists(CRITERIA, max_size=2),
    cut=st.integers(1, 4),
)
def test_a_row_depends_on_itself_alone(mask, seed, level, criteria, cut):
    log_ratio, _ = _batch(mask, seed, 0.5)
    correction = _weighing(level, 1.5, criteria=tuple(criteria))
    whole = correct(log_ratio, mask, correction)
    for rows in (slice(0, cut), slice(cut, None)):
        if len(mask[rows]) == 0:
            continue
        part = correct(log_ratio[rows], mask[rows], correction)
        assert torch.equal(part.kept, whole.kept[rows])
        if level is not None:
            torch.testing.assert_close(part.weights, whole.weights[rows], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(part.raw, whole.raw[rows], rtol=1e-12, atol=1e-12)
