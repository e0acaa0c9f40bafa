"""Metrics of importance weights and of rejection against hand-computed numbers and slow loops.

The numbers are also those that verl 0.9.1's rollout_corr_helper prints for the same batches. The
weights and the rejection themselves are tested in `test_correction`.
"""

import math
import statistics
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.correction import Correction, Criterion, correct
from mrlhf.rl.mismatch import criterion_metrics, rejection_metrics, weight_metrics
from mrlhf.rl.names import Statistic
from tests.masks import kept_rows, masks
from tests.oracle import plain_correction

NAN = math.nan
LN2 = math.log(2.0)
# Two tokens in the first row, one in the second, and none in the third.
MASK = torch.tensor([[True, True], [True, False], [False, False]])


def _correction(level, upper=2.0, lower=None, normalise=False, criteria=()):
    return Correction(level=level, lower=lower, upper=upper, normalise=normalise, criteria=criteria)


def _weight_metrics(log_ratio, mask, correction):
    log_ratio = torch.as_tensor(log_ratio)
    return weight_metrics(correct(log_ratio, mask, correction), correction, log_ratio, mask)


def _without_prefix(metrics):
    return {name.removeprefix("rollout_is_"): number for name, number in metrics.items()}


# Ratios 4, 1/4, 1, of which 4 is cut to 2, or lies outside [.2, 2] and becomes 0. Products 4, cut
# to 2 on two tokens, and 1/8 on one; the third row has no token.
WEIGHT_METRICS = {
    "mean": (1.0833333, 0.4166667, 1.375),  # over tokens
    "max": (2.0, 1.0, 4.0),  # of sequences before the cut
    "min": (0.25, 0.0, 0.125),
    "std": (0.7168604, 0.4249183, 0.8838835),
    # mean^2 over mean square: 1.1736111 / 1.6875, .1736111 / .3541667, 1.890625 / 2.6718750
    "eff_sample_size": (0.6954733, 0.4901961, 0.7076023),
    "ratio_fraction_high": (1 / 3, 1 / 3, 0.5),
    "ratio_fraction_low": (1 / 3, 0.0, 0.5),
    "seq_mean": (1.0625, 0.5625, 1.0625),  # of 2.25 / 2 and 1; of .25 / 2 and 1; of 2 and 1/8
    "seq_std": (0.0883883, 0.6187184, 1.3258252),
    "seq_max": (1.125, 1.0, 2.0),
    "seq_min": (1.0, 0.125, 0.125),
    "seq_max_deviation": (0.125, 0.875, 1.0),
    "seq_fraction_high": (0.5, 0.5, 0.5),  # 4.25 / 2 before the cut
    "seq_fraction_low": (0.0, 0.0, 0.5),
}
TOKENS = [[2 * LN2, -2 * LN2], [0.0, NAN], [NAN, NAN]]
SEQUENCES = [[LN2, LN2], [-3 * LN2, NAN], [NAN, NAN]]


@pytest.mark.parametrize(
    ("column", "log_ratio", "level", "lower", "more", "factor"),
    [
        (0, TOKENS, "token", None, {}, 1.0833333),
        (1, TOKENS, "token", 0.2, {"oob_ratio": 1 / 3}, 0.4166667),
        (2, SEQUENCES, "sequence", None, {}, 1.0625),
    ],
)
def test_metrics_of_weights(column, log_ratio, level, lower, more, factor):
    expected = more | {name: numbers[column] for name, numbers in WEIGHT_METRICS.items()}
    correction = _correction(level, lower=lower)
    metrics = _without_prefix(_weight_metrics(log_ratio, MASK, correction))
    assert metrics == pytest.approx(expected, abs=1e-6)
    # They are of the weights before these are normalised.
    normalised = _weight_metrics(log_ratio, MASK, replace(correction, normalise=True))
    expected["batch_norm_factor"] = factor
    assert _without_prefix(normalised) == pytest.approx(expected, abs=1e-6)


def test_shares_and_extremes_of_weights():
    metrics = _weight_metrics(TOKENS, MASK, _correction("token", lower=0.3))
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    smallest = [[-20.0, -20.0], [0.0, 0.0], [0.0, 0.0]]
    metrics = _weight_metrics(smallest, MASK, _correction("sequence"))
    assert metrics["rollout_is_min"] == pytest.approx(math.exp(-40))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_at_the_bound_that_are_zero_of_one_token_and_of_nothing(level):
    two = torch.ones(2, 1, dtype=torch.bool)
    metrics = _weight_metrics(torch.zeros(2, 1), two, _correction(level, upper=1.0))
    assert metrics["rollout_is_ratio_fraction_high"] == 0.0  # at the bound is not beyond it
    assert metrics["rollout_is_ratio_fraction_low"] == 0.0

    far = [[3.0], [3.0]]
    metrics = _weight_metrics(far, two, _correction(level, lower=0.5))
    assert metrics["rollout_is_eff_sample_size"] == metrics["rollout_is_mean"] == 0.0
    assert metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_oob_ratio"] == 1.0
    normalised = _weight_metrics(far, two, _correction(level, lower=0.5, normalise=True))
    assert normalised["rollout_is_batch_norm_factor"] == 1.0

    metrics = _weight_metrics([[0.0]], torch.tensor([[True]]), _correction(level))
    assert metrics["rollout_is_std"] == 0.0
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(1.0, rel=1e-7)
    metrics = _weight_metrics(torch.zeros(2, 1), ~two, _correction(level))
    assert len(metrics) == 14
    assert all(math.isnan(number) for number in metrics.values())
    assert _weight_metrics(torch.zeros(2, 1), two, _correction(None)) == {}


def test_shares_of_what_was_rejected():
    log_ratio = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 9.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    criteria = (Criterion("token_k1", 0.5, 2.0), Criterion("seq_sum_k2", None, 9.0))
    metrics = _rejection_metrics(log_ratio, mask, criteria)
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)
    assert metrics["rollout_rs_token_k1_masked_fraction"] == pytest.approx(1 / 5)
    assert metrics["rollout_rs_seq_sum_k2_masked_fraction"] == 0.0

    kept = _rejection_metrics(log_ratio, mask, ())
    assert kept == {"rollout_rs_masked_fraction": 0.0, "rollout_rs_seq_masked_fraction": 0.0}

    metrics = _rejection_metrics(log_ratio, torch.zeros_like(mask), criteria)
    assert metrics.pop("rollout_rs_seq_sum_k2_fraction_low") == 0.0  # there is no lower bound
    assert all(math.isnan(number) for number in metrics.values())


def _rejection_metrics(log_ratio, mask, criteria):
    correction = _correction(None, criteria=criteria)
    return rejection_metrics(correct(log_ratio, mask, correction), correction, log_ratio, mask)


CRITERIA = (
    Criterion("token_k1", 0.5, 2.0),
    Criterion("seq_mean_k3", None, 0.02),
    Criterion("seq_sum_k1", 0.8, 1.1),
)
CRITERION_METRICS = {
    "mean": (-0.2083333, 0.1322189, -0.5),
    "max": (0.2, 0.2456709, -0.15),
    "min": (-1.0, 0.003221, -0.8),
    "fraction_high": (0.0, 2 / 3, 0.0),
    "fraction_low": (1 / 6, 0.0, 2 / 3),
    "std": (0.2812764, 0.0079097, 0.0344802),
    "seq_mean": (-0.2138889, 0.0995836, -0.4166667),
    "seq_std": (0.1214305, 0.1286464, 0.340343),
    "seq_max": (-0.075, 0.2456709, -0.15),
    "seq_min": (-0.3, 0.003221, -0.8),
    "seq_max_deviation": (0.3, 0.2456709, 0.8),
    "seq_fraction_high": (0.0, 2 / 3, 0.0),
    "seq_fraction_low": (0.0, None, 2 / 3),  # one has no lower bound
    "masked_fraction": (1 / 6, 2 / 3, 2 / 3),
    "seq_masked_fraction": (1 / 3, 2 / 3, 2 / 3),
}


@pytest.mark.parametrize("column", range(3), ids=lambda column: CRITERIA[column].statistic)
def test_metrics_of_a_criterion_are_those_of_verl(column):
    log_ratio = torch.tensor([[0.0, 1.0, -0.2], [0.1, 0.05, 9.0], [0.3, NAN, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    numbers = {name: columns[column] for name, columns in CRITERION_METRICS.items()}
    expected = {name: number for name, number in numbers.items() if number is not None}
    found = criterion_metrics(CRITERIA[column], log_ratio, mask)
    assert found == pytest.approx(expected, abs=2e-7)


def _mean(numbers):
    return sum(numbers) / len(numbers) if numbers else NAN


def _std(numbers):
    if not numbers:
        return NAN
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def _slow_weights(rows, correction):
    upper = correction.upper
    lower = correction.lower
    raw = plain_correction.ratios(rows, correction)
    cut = plain_correction.weights(rows, correction)
    ratios = [x for row in raw for x in row]
    weights = [x for row in cut for x in row]
    means = [_mean(row) for row in cut if row]
    raw_means = [_mean(row) for row in raw if row]

    units = ratios if correction.level == "token" else [row[0] for row in raw if row]
    extremes = weights if correction.level == "token" else units
    floor = 1 / upper if lower is None else lower
    mean = _mean(weights)
    squares = _mean([w * w for w in weights])
    banded = {}
    if lower is not None:
        banded["oob_ratio"] = _mean([float(not lower <= x <= upper) for x in ratios])
    if correction.normalise:
        factor = mean if correction.level == "token" else _mean(means)
        banded["batch_norm_factor"] = factor if factor > 1e-8 else 1.0
    return banded | {
        "seq_mean": _mean(means),
        "seq_std": _std(means),
        "seq_max": max(means, default=NAN),
        "seq_min": min(means, default=NAN),
        "seq_max_deviation": max((abs(x - 1) for x in means), default=NAN),
        "seq_fraction_high": _mean([float(x > upper) for x in raw_means]),
        "seq_fraction_low": _mean([float(x < floor) for x in raw_means]),
        "mean": mean,
        "max": max(extremes, default=NAN),
        "min": min(extremes, default=NAN),
        "std": math.sqrt(max(squares - mean**2, 0.0)) if weights else NAN,
        "eff_sample_size": NAN if not weights else mean**2 / squares if squares else 0.0,
        "ratio_fraction_high": _mean([float(x > upper) for x in units]),
        "ratio_fraction_low": _mean([float(x < floor) for x in units]),
    }


@settings(max_examples=150)
@given(
    mask=masks(),
    seed=st.integers(0, 1000),
    level=st.sampled_from(["token", "sequence"]),
    upper=st.sampled_from([1.3, 2.0]),
    lower=st.sampled_from([None, 0.4, 0.8]),
    normalise=st.booleans(),
)
def test_weight_metrics_equal_the_slow_loop(mask, seed, level, upper, lower, normalise):
    log_ratio = torch.randn(
        mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    correction = _correction(level, upper, lower, normalise)
    metrics = _without_prefix(_weight_metrics(log_ratio.masked_fill(~mask, NAN), mask, correction))
    expected = _slow_weights(kept_rows(log_ratio, mask), correction)
    # The standard deviation of the loop is rounded more; the sample size has an epsilon in its
    # quotient.
    assert metrics.pop("std") == pytest.approx(expected.pop("std"), abs=1e-6, nan_ok=True)
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)


def _slow_criterion(rows, criterion):
    lower, upper = criterion.bounds
    rows_of_values = plain_correction.estimates(criterion.statistic, [row for row in rows if row])
    means = [_mean(row) for row in rows_of_values]
    values = means
    if criterion.statistic.startswith("token"):
        values = [x for row in rows_of_values for x in row]

    def high(numbers):
        return _mean([float(x > upper) for x in numbers])

    def low(numbers):
        return _mean([float(lower is not None and x < lower) for x in numbers])

    tokens = [x for row in rows_of_values for x in row]
    clamped = [min(max(x, 0.0 if lower is None else lower), upper) for x in tokens]
    bad = [[x > upper or (lower is not None and x < lower) for x in row] for row in rows_of_values]
    metrics = {
        "mean": _mean(tokens),
        "max": max(values, default=NAN),
        "min": min(values, default=NAN),
        "fraction_high": high(values),
        "fraction_low": low(values) if lower is not None else 0.0,
        "std": statistics.pstdev(clamped) if clamped else NAN,
        "seq_mean": _mean(means),
        "seq_std": _std(means),
        "seq_max": max(means, default=NAN),
        "seq_min": min(means, default=NAN),
        "seq_max_deviation": max((abs(x) for x in means), default=NAN),
        "seq_fraction_high": high(means),
        "masked_fraction": _mean([float(x) for row in bad for x in row]),
        "seq_masked_fraction": _mean([float(any(row)) for row in bad]),
    }
    if lower is not None:
        metrics["seq_fraction_low"] = low(means)
    return metrics


@pytest.mark.parametrize("statistic", get_args(Statistic))
@settings(max_examples=30)
@given(mask=masks(), seed=st.integers(0, 1000))
def test_metrics_of_each_criterion_equal_the_slow_loop(statistic, mask, seed):
    log_ratio = torch.randn(
        mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    k1 = statistic.endswith("k1")
    criterion = Criterion(statistic, 0.7 if k1 else None, 1.6 if k1 else 0.3)
    metrics = criterion_metrics(criterion, log_ratio.masked_fill(~mask, NAN), mask)
    expected = _slow_criterion(kept_rows(log_ratio, mask), criterion)
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
