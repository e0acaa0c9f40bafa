"""Metrics of the mismatch of engine and trainer against hand-computed numbers and a slow loop.

The numbers are also those that verl 0.9.1's rollout_corr_helper prints for the same batches. What
correction does about the mismatch is measured in `test_correction_metrics`.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.mismatch import mismatch_metrics, probability_metrics
from tests.masks import kept_rows, masks

NAN = math.nan
# Trainer less engine: .2 and -.5 in the first row, .1 in the second; the third has no token.
TRAINER = torch.tensor([[-1.0, -2.0], [-0.5, NAN], [NAN, NAN]])
ROLLOUT = torch.tensor([[-1.2, -1.5], [-0.6, NAN], [NAN, 3.0]])
MASK = torch.tensor([[True, True], [True, False], [False, False]])


def test_numbers_of_the_worked_example():
    expected = {
        "kl": 0.0666667,  # (-.2 + .5 - .1) / 3
        "k3_kl": 0.0443681,  # (.0214028 + .1065307 + .0051709) / 3
        "training_ppl": 3.0652052,  # (e^1.5 + e^.5) / 2
        "training_log_ppl": 1.0,
        "rollout_ppl": 2.8397721,  # (e^1.35 + e^.6) / 2
        "rollout_log_ppl": 0.975,
        "log_ppl_diff": 0.025,  # (.15 - .1) / 2
        "log_ppl_abs_diff": 0.125,
        "log_ppl_diff_max": 0.15,
        "log_ppl_diff_min": -0.1,
        "ppl_ratio": 1.0333358,  # (e^.15 + e^-.1) / 2
        "chi2_token": 0.0270357,  # (e^.4 + e^-1 + e^.2) / 3 - 1
        "chi2_seq": -0.1148928,  # (e^-.6 + e^.2) / 2 - 1
    }

    assert mismatch_metrics(TRAINER, ROLLOUT, MASK) == pytest.approx(expected, abs=2e-7)


def test_mismatch_of_nothing_is_not_a_number():
    metrics = mismatch_metrics(TRAINER, ROLLOUT, torch.zeros_like(MASK))
    assert len(metrics) == 13 and all(math.isnan(number) for number in metrics.values())


def test_an_engine_far_off_gives_finite_numbers():
    def metrics(trainer, rollout):
        tables = torch.tensor([[trainer]]), torch.tensor([[rollout]]), torch.tensor([[True]])
        return mismatch_metrics(*tables)

    found = metrics(-0.1, -500.0)
    assert found["chi2_token"] == found["chi2_seq"] == pytest.approx(math.exp(40))
    assert found["k3_kl"] == pytest.approx(math.exp(20) - 1 - 499.9)
    assert metrics(-40.0, 0.0)["k3_kl"] == 39.0


def test_probabilities_are_compared():
    trainer = torch.tensor([[0.5, 0.25], [0.1, NAN]]).log()
    rollout = torch.tensor([[0.4, 0.25], [0.2, 0.9]]).log()
    mask = torch.tensor([[True, True], [True, False]])

    assert probability_metrics(trainer, rollout, mask) == pytest.approx(
        {
            "rollout_probs_diff_valid": 1.0,
            "rollout_probs_diff_mean": 0.2 / 3,
            "rollout_probs_diff_max": 0.1,
            "rollout_probs_diff_std": 0.0577350,
            "rollout_actor_probs_pearson_corr": 0.9905361,  # .0416667 / sqrt(.0816667 * .0216667)
        },
        abs=1e-6,
    )

    same = probability_metrics(trainer, trainer, mask)
    assert same["rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)

    constant = probability_metrics(trainer, torch.zeros(2, 2), mask)
    assert math.isnan(constant["rollout_actor_probs_pearson_corr"])

    nothing = probability_metrics(trainer, rollout, torch.zeros_like(mask))
    assert nothing.pop("rollout_probs_diff_valid") == 0.0
    assert len(nothing) == 4 and all(math.isnan(number) for number in nothing.values())


def _mean(numbers):
    return sum(numbers) / len(numbers) if numbers else NAN


def _slow_mismatch(trainer_rows, rollout_rows):
    pairs = [(p, q) for p, q in zip(trainer_rows, rollout_rows, strict=True) if p]
    gaps = [a - b for p, q in pairs for a, b in zip(p, q, strict=True)]

    return {
        "kl": _mean([-x for x in gaps]),
        "k3_kl": _mean([math.exp(x) - 1 - x for x in gaps]),
        "training_ppl": _mean([math.exp(-_mean(p)) for p, _ in pairs]),
        "training_log_ppl": _mean([-_mean(p) for p, _ in pairs]),
        "rollout_log_ppl": _mean([-_mean(q) for _, q in pairs]),
        "log_ppl_abs_diff": _mean([abs(_mean(q) - _mean(p)) for p, q in pairs]),
        "log_ppl_diff_max": max((_mean(q) - _mean(p) for p, q in pairs), default=NAN),
        "log_ppl_diff_min": min((_mean(q) - _mean(p) for p, q in pairs), default=NAN),
        "rollout_ppl": _mean([math.exp(-_mean(q)) for _, q in pairs]),
        "log_ppl_diff": _mean([_mean(q) - _mean(p) for p, q in pairs]),
        "ppl_ratio": _mean([math.exp(-_mean(p)) / math.exp(-_mean(q)) for p, q in pairs]),
        "chi2_token": _mean([math.exp(x) ** 2 for x in gaps]) - 1,
        "chi2_seq": _mean([math.exp(sum(p) - sum(q)) ** 2 for p, q in pairs]) - 1,
    }


@settings(max_examples=100)
@given(mask=masks(), seed=st.integers(0, 1000))
def test_mismatch_equals_the_slow_loop(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    trainer, rollout = -2 * torch.rand(2, *mask.shape, dtype=torch.float64, generator=generator)
    metrics = mismatch_metrics(
        trainer.masked_fill(~mask, NAN), rollout.masked_fill(~mask, NAN), mask
    )
    expected = _slow_mismatch(kept_rows(trainer, mask), kept_rows(rollout, mask))
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
