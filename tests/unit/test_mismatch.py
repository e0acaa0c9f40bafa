"""Metrics of the mismatch of engine and trainer against hand-computed numbers and slow loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.correction import Correction, Criterion, correct
from mrlhf.rl.mismatch import mismatch_metrics, rejection_metrics, weight_metrics
from tests.masks import masks

NAN = math.nan
# Trainer less engine: .2 and -.5 in the first row, .1 in the second; the third has no token.
TRAINER = torch.tensor([[-1.0, -2.0], [-0.5, NAN], [NAN, NAN]])
ROLLOUT = torch.tensor([[-1.2, -1.5], [-0.6, NAN], [NAN, 3.0]])
MASK = torch.tensor([[True, True], [True, False], [False, False]])
LN2 = math.log(2.0)


def _correction(level, upper=2.0, lower=None, normalise=False, criteria=()):
    return Correction(level=level, lower=lower, upper=upper, normalise=normalise, criteria=criteria)


def _weight_metrics(log_ratio, mask, correction):
    log_ratio = torch.as_tensor(log_ratio)
    return weight_metrics(correct(log_ratio, mask, correction), correction, log_ratio, mask)


def _without_prefix(metrics):
    return {name.removeprefix("rollout_is_"): number for name, number in metrics.items()}


def test_numbers_of_the_worked_example():
    expected = {
        "kl": 0.0666667,  # (-.2 + .5 - .1) / 3
        "k3_kl": 0.0443681,  # (.0214028 + .1065307 + .0051709) / 3
        "training_ppl": 3.0652052,  # (e^1.5 + e^.5) / 2
        "rollout_ppl": 2.8397721,  # (e^1.35 + e^.6) / 2
        "log_ppl_diff": 0.025,  # (.15 - .1) / 2
        "ppl_ratio": 1.0333358,  # (e^.15 + e^-.1) / 2
        "chi2_token": 0.0270357,  # (e^.4 + e^-1 + e^.2) / 3 - 1
        "chi2_seq": -0.1148928,  # (e^-.6 + e^.2) / 2 - 1
    }
    assert mismatch_metrics(TRAINER, ROLLOUT, MASK) == pytest.approx(expected, abs=2e-7)


def test_policies_that_agree():
    metrics = mismatch_metrics(TRAINER, TRAINER, MASK)
    perplexity = pytest.approx(3.0652052, abs=1e-6)
    assert metrics.pop("training_ppl") == perplexity and metrics.pop("rollout_ppl") == perplexity
    assert metrics.pop("ppl_ratio") == 1.0
    assert set(metrics.values()) == {0.0}


def test_mismatch_of_nothing_is_not_a_number():
    metrics = mismatch_metrics(TRAINER, ROLLOUT, torch.zeros_like(MASK))
    assert len(metrics) == 8 and all(math.isnan(number) for number in metrics.values())


def test_an_engine_far_off_gives_finite_numbers():
    metrics = mismatch_metrics(
        torch.tensor([[-0.1]]), torch.tensor([[-500.0]]), torch.tensor([[True]])
    )
    assert metrics["chi2_token"] == pytest.approx(math.exp(40)) and metrics[
        "chi2_seq"
    ] == pytest.approx(math.exp(40))
    assert metrics["k3_kl"] == pytest.approx(math.exp(20) - 1 - 499.9)
    assert (
        mismatch_metrics(torch.tensor([[-40.0]]), torch.tensor([[0.0]]), torch.tensor([[True]]))[
            "k3_kl"
        ]
        == 39.0
    )


def test_metrics_of_token_weights():
    # Ratios 4, 1/4, 1, of which 4 is cut to 2.
    log_ratio = [[2 * LN2, -2 * LN2], [0.0, NAN]]
    mask = torch.tensor([[True, True], [True, False]])
    expected = {
        "mean": 1.0833333,
        "max": 2.0,
        "min": 0.25,
        "std": 0.7168604,
        "eff_sample_size": 0.6954733,  # mean^2 1.1736111 over mean square 1.6875
        "ratio_fraction_high": 1 / 3,
        "ratio_fraction_low": 1 / 3,
    }

    metrics = _without_prefix(_weight_metrics(log_ratio, mask, _correction("token")))
    assert metrics == pytest.approx(expected, abs=1e-6)
    # They are of the weights before these are normalised.
    normalised = _without_prefix(
        _weight_metrics(log_ratio, mask, _correction("token", normalise=True))
    )
    assert normalised == pytest.approx(expected, abs=1e-6)


def test_metrics_of_token_weights_in_a_band():
    # Ratios 4, 1/4, 1: outside [.2, 2] only 4, which becomes 0.
    log_ratio = [[2 * LN2, -2 * LN2], [0.0, NAN]]
    mask = torch.tensor([[True, True], [True, False]])
    expected = {
        "mean": 0.4166667,
        "max": 1.0,
        "min": 0.0,
        "std": 0.4249183,
        "eff_sample_size": 0.4901961,  # .1736111 / .3541667
        "ratio_fraction_high": 1 / 3,
        "ratio_fraction_low": 0.0,
    }

    metrics = _without_prefix(_weight_metrics(log_ratio, mask, _correction("token", lower=0.2)))
    assert metrics == pytest.approx(expected, abs=1e-6)
    metrics = _weight_metrics(log_ratio, mask, _correction("token", lower=0.3))
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)


def test_metrics_of_sequence_weights():
    # Products 4, cut to 2 on two tokens, and 1/8 on one; the third row has no token.
    log_ratio = [[LN2, LN2], [-3 * LN2, NAN], [NAN, NAN]]
    expected = {
        "mean": 1.375,  # over tokens
        "max": 4.0,  # before the cut
        "min": 0.125,
        "std": 0.8838835,
        "eff_sample_size": 0.7076023,  # 1.890625 / 2.6718750
        "ratio_fraction_high": 0.5,
        "ratio_fraction_low": 0.5,
    }

    metrics = _without_prefix(_weight_metrics(log_ratio, MASK, _correction("sequence")))
    assert metrics == pytest.approx(expected, abs=1e-6)
    smallest = _weight_metrics(
        [[-20.0, -20.0], [0.0, 0.0], [0.0, 0.0]], MASK, _correction("sequence")
    )
    assert smallest["rollout_is_min"] == pytest.approx(math.exp(-40))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_at_the_bound_is_not_beyond_it(level):
    mask = torch.tensor([[True], [True]])
    metrics = _weight_metrics(torch.zeros(2, 1), mask, _correction(level, upper=1.0))
    assert (
        metrics["rollout_is_ratio_fraction_high"] == metrics["rollout_is_ratio_fraction_low"] == 0.0
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_that_are_all_zero_count_for_no_sample(level):
    metrics = _weight_metrics(
        [[3.0], [3.0]], torch.ones(2, 1, dtype=torch.bool), _correction(level, lower=0.5)
    )
    assert (
        metrics["rollout_is_eff_sample_size"] == 0.0
        and metrics["rollout_is_ratio_fraction_high"] == 1.0
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_one_token(level):
    metrics = _weight_metrics([[0.0]], torch.tensor([[True]]), _correction(level))
    assert metrics["rollout_is_std"] == 0.0
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(1.0, rel=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_nothing_are_not_a_number(level):
    metrics = _weight_metrics(
        torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool), _correction(level)
    )
    assert len(metrics) == 7
    assert all(math.isnan(number) for number in metrics.values())


def test_no_weights_no_metrics():
    assert (
        _weight_metrics(torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), _correction(None))
        == {}
    )


def test_shares_of_what_was_rejected():
    log_ratio = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 9.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    criteria = (Criterion("token_k1", 0.5, 2.0),)
    metrics = rejection_metrics(
        correct(log_ratio, mask, _correction(None, criteria=criteria)), mask
    )
    assert metrics == {
        "rollout_rs_masked_fraction": pytest.approx(1 / 5),
        "rollout_rs_seq_masked_fraction": pytest.approx(1 / 2),
    }

    kept = rejection_metrics(correct(log_ratio, mask, _correction(None)), mask)
    assert kept == {"rollout_rs_masked_fraction": 0.0, "rollout_rs_seq_masked_fraction": 0.0}

    nothing = torch.zeros_like(mask)
    metrics = rejection_metrics(correct(log_ratio, nothing, _correction(None)), nothing)
    assert all(math.isnan(number) for number in metrics.values())


# ---- slow loops


def _mean(numbers):
    return sum(numbers) / len(numbers) if numbers else NAN


def _slow_mismatch(trainer_rows, rollout_rows):
    pairs = [(p, q) for p, q in zip(trainer_rows, rollout_rows, strict=True) if p]
    gaps = [a - b for p, q in pairs for a, b in zip(p, q, strict=True)]
    return {
        "kl": _mean([-x for x in gaps]),
        "k3_kl": _mean([math.exp(x) - 1 - x for x in gaps]),
        "training_ppl": _mean([math.exp(-_mean(p)) for p, _ in pairs]),
        "rollout_ppl": _mean([math.exp(-_mean(q)) for _, q in pairs]),
        "log_ppl_diff": _mean([_mean(q) - _mean(p) for p, q in pairs]),
        "ppl_ratio": _mean([math.exp(-_mean(p)) / math.exp(-_mean(q)) for p, q in pairs]),
        "chi2_token": _mean([math.exp(x) ** 2 for x in gaps]) - 1,
        "chi2_seq": _mean([math.exp(sum(p) - sum(q)) ** 2 for p, q in pairs]) - 1,
    }


def _slow_weights(rows, correction):
    upper = correction.upper
    lower = correction.lower
    ratios = []
    weights = []
    for row in rows:
        for x in row:
            ratio = math.exp(x if correction.level == "token" else sum(row))
            ratios.append(ratio)
            if lower is None:
                weights.append(min(ratio, upper))
            else:
                weights.append(ratio if lower <= ratio <= upper else 0.0)

    units = ratios if correction.level == "token" else [math.exp(sum(row)) for row in rows if row]
    extremes = weights if correction.level == "token" else units
    floor = 1 / upper if lower is None else lower
    mean = _mean(weights)
    squares = _mean([w * w for w in weights])
    return {
        "mean": mean,
        "max": max(extremes, default=NAN),
        "min": min(extremes, default=NAN),
        "std": math.sqrt(max(squares - mean**2, 0.0)) if weights else NAN,
        "eff_sample_size": NAN if not weights else mean**2 / squares if squares else 0.0,
        "ratio_fraction_high": _mean([float(x > upper) for x in units]),
        "ratio_fraction_low": _mean([float(x < floor) for x in units]),
    }


def _rows(table, mask):
    return [x[m].tolist() for x, m in zip(table, mask, strict=True)]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(mask=masks(), seed=st.integers(0, 1000))
def test_mismatch_equals_the_slow_loop(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    trainer, rollout = -2 * torch.rand(2, *mask.shape, dtype=torch.float64, generator=generator)
    metrics = mismatch_metrics(
        trainer.masked_fill(~mask, NAN), rollout.masked_fill(~mask, NAN), mask
    )
    expected = _slow_mismatch(_rows(trainer, mask), _rows(rollout, mask))
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@settings(derandomize=True, deadline=None, max_examples=150)
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
    expected = _slow_weights(_rows(log_ratio, mask), correction)
    # The standard deviation of the loop is rounded more; the sample size has an epsilon in its
    # quotient.
    assert metrics.pop("std") == pytest.approx(expected.pop("std"), abs=1e-6, nan_ok=True)
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
