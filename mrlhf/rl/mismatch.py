"""Metrics of the mismatch between the engine that drew the responses and the trained policy.

Names and definitions are those of verl. Tables are [batch, response_len], with a bool `mask`; a
log-ratio is trainer less engine. Every number is taken over the whole batch: over the tokens of its
mask, or over the sequences that have at least one. Where there is nothing to count, the number is
NaN. This file does not know which of the trainer's policies is meant.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mrlhf.rl.correction import Corrected, Correction, Criterion, normalisation_factor, truncate
from mrlhf.rl.kl import LOG_RATIO_LIMIT
from mrlhf.rl.masking import local_moments, masked_mean, masked_sum, selected

MEAN_EPS = 1e-8
_ROWS_AT_ONCE = 128  # their tables stay in the cache of a core


def mismatch_metrics(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Divergences and perplexities of the trainer's policy against the engine's.

    - `kl`, `k3_kl`: estimates of KL(engine || trainer) a token.
    - `training_ppl`, `rollout_ppl`: means of the sequences' perplexities; `training_log_ppl`,
      `rollout_log_ppl`: means of their logarithms.
    - `log_ppl_diff`, `log_ppl_abs_diff`, `log_ppl_diff_max`, `log_ppl_diff_min`: mean, mean size,
      maximum and minimum of the difference of these logarithms, trainer less engine.
    - `ppl_ratio`: mean of the quotients of the perplexities.
    - `chi2_token`, `chi2_seq`: the mean square of the probability ratio, trainer over engine, of a
      token and of a whole sequence, less 1.
    """
    tables = (trainer_logprobs, rollout_logprobs, mask)
    blocks = [_block(*rows) for rows in zip(*(x.split(_ROWS_AT_ONCE) for x in tables), strict=True)]
    of_tokens = torch.stack([block.of_tokens for block in blocks]).sum(dim=0)
    tokens, trainer, rollout = torch.cat([block.of_rows for block in blocks], dim=1)

    kl, k3_kl, chi2_token = (of_tokens / tokens.sum()).tolist()
    rows = tokens > 0
    log_ppl = -trainer / tokens.clamp(min=1)
    rollout_log_ppl = -rollout / tokens.clamp(min=1)
    sequence_log_ratio = _clamped(trainer - rollout)
    log_ppl_diff = log_ppl - rollout_log_ppl

    return {
        "kl": kl,
        "k3_kl": k3_kl,
        "training_ppl": _mean(log_ppl.exp(), rows),
        "training_log_ppl": _mean(log_ppl, rows),
        "rollout_ppl": _mean(rollout_log_ppl.exp(), rows),
        "rollout_log_ppl": _mean(rollout_log_ppl, rows),
        "log_ppl_diff": _mean(log_ppl_diff, rows),
        "log_ppl_abs_diff": _mean(log_ppl_diff.abs(), rows),
        "log_ppl_diff_max": _max(log_ppl_diff[rows]),
        "log_ppl_diff_min": _min(log_ppl_diff[rows]),
        "ppl_ratio": _mean(log_ppl_diff.exp(), rows),
        "chi2_token": chi2_token - 1,
        "chi2_seq": _mean((2 * sequence_log_ratio).exp(), rows) - 1,
    }


class _Block(NamedTuple):
    """The sums over some rows from which `mismatch_metrics` computes its numbers; float64."""

    of_tokens: Tensor  # [3], sums over tokens: of both estimates of KL, and of the squared ratio
    of_rows: Tensor  # [3, rows], of each row: its tokens, and the sums of both log-probabilities


def _block(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> _Block:
    trainer = torch.where(mask, trainer_logprobs.detach().double(), 0)
    rollout = torch.where(mask, rollout_logprobs.detach().double(), 0)
    log_ratio = selected(trainer - rollout, mask)

    k3 = log_ratio.clamp(max=LOG_RATIO_LIMIT).exp_() - 1 - log_ratio
    squares = (2 * _clamped(log_ratio)).exp_()
    of_rows = torch.stack([mask.sum(dim=1).double(), trainer.sum(dim=1), rollout.sum(dim=1)])
    return _Block(torch.stack([-log_ratio.sum(), k3.sum(), squares.sum()]), of_rows)


def probability_metrics(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """The size of the differences between trainer and engine in the drawn tokens' probabilities.

    - `rollout_probs_diff_valid`: 1 if there is a token to compare, else 0.
    - `rollout_probs_diff_mean`, `max`, `std`: of the sizes of the differences.
    - `rollout_actor_probs_pearson_corr`: Pearson's correlation of the two probabilities; NaN if one
      of them is the same for all tokens.
    """
    trainer = selected(trainer_logprobs, mask).double().exp_()
    rollout = selected(rollout_logprobs, mask).double().exp_()
    gap = (trainer - rollout).abs()
    return {
        "rollout_probs_diff_valid": float(gap.numel() > 0),
        "rollout_probs_diff_mean": float(gap.mean()),
        "rollout_probs_diff_max": _max(gap),
        "rollout_probs_diff_std": _std(gap),
        "rollout_actor_probs_pearson_corr": _correlation(trainer, rollout),
    }


def weight_metrics(
    corrected: Corrected, correction: Correction, log_ratio: Tensor, mask: Tensor
) -> dict[str, float]:
    """Statistics of the weights before any normalisation; empty where there are no weights.

    All names begin with `rollout_is_`. `corrected` is the result of `correct` for the other
    arguments.

    - `mean`, `std`, `eff_sample_size`: over tokens, of truncated weights; the last one is a share
      of the tokens, and 0 where all weights are 0.
    - `max`, `min`: of truncated weights at the token level, of raw ones at the sequence level.
    - `ratio_fraction_high`, `ratio_fraction_low`: the share of tokens or sequences whose raw weight
      is above `correction.upper`, or below `correction.lower` (1 / upper where that is None).
    - `oob_ratio`: the share of tokens whose raw weight is outside the band; only with a band.
    - `seq_mean`, `seq_std`, `seq_max`, `seq_min`, `seq_max_deviation`: over sequences, of the mean
      truncated weight of each; the last one is the largest distance from 1.
    - `seq_fraction_high`, `seq_fraction_low`: the share of sequences whose mean raw weight is
      beyond these bounds.
    - `batch_norm_factor`: the number by which the weights were divided; only with normalisation.
    """
    if corrected.raw is None or correction.level is None:
        return {}

    raw = corrected.raw.double()
    weights = truncate(raw, correction)
    mean = _mean(weights, mask)
    mean_square = _mean(weights.square(), mask)
    lower = 1 / correction.upper if correction.lower is None else correction.lower

    rows = mask.any(dim=1)
    of_sequences = masked_mean(weights, mask, dim=1)[rows]
    raw_of_sequences = masked_mean(raw, mask, dim=1)[rows]
    if correction.level == "sequence":
        # Not from `raw`, whose clamp would hide how small the smallest is.
        sequence_log_ratio = masked_sum(log_ratio.detach().double(), mask, dim=1)[rows]
        extremes = sequence_log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()
        ratios = raw_of_sequences
    else:
        extremes = selected(weights, mask)
        ratios = selected(raw, mask)

    metrics = {
        "mean": mean,
        "max": _max(extremes),
        "min": _min(extremes),
        "std": _mean((weights - mean).square(), mask) ** 0.5,
        "eff_sample_size": (mean + MEAN_EPS) ** 2 / mean_square if mean_square else 0.0,
        "ratio_fraction_high": _share(ratios > correction.upper),
        "ratio_fraction_low": _share(ratios < lower),
        "seq_max_deviation": _max((of_sequences - 1).abs()),
        "seq_fraction_high": _share(raw_of_sequences > correction.upper),
        "seq_fraction_low": _share(raw_of_sequences < lower),
        **_spread("seq", of_sequences),
    }
    if correction.lower is not None:
        flat = selected(raw, mask)
        metrics["oob_ratio"] = _share((flat < lower) | (flat > correction.upper))
    if correction.normalise:
        metrics["batch_norm_factor"] = float(normalisation_factor(weights, mask, correction.level))
    return {f"rollout_is_{name}": number for name, number in metrics.items()}


def rejection_metrics(
    corrected: Corrected, correction: Correction, log_ratio: Tensor, mask: Tensor
) -> dict[str, float]:
    """The shares of rejected tokens and sequences, and the statistics by which they were rejected.

    Those of each criterion alone are named `rollout_rs_<statistic>_`. `corrected` is the result of
    `correct` for the other arguments.
    """
    metrics = _rejected_shares(mask & ~corrected.kept, mask)
    for criterion in correction.criteria:
        of_criterion = criterion_metrics(criterion, log_ratio, mask)
        metrics |= {f"{criterion.statistic}_{name}": x for name, x in of_criterion.items()}
    return {f"rollout_rs_{name}": number for name, number in metrics.items()}


def criterion_metrics(criterion: Criterion, log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """The statistic of one criterion, and the shares that the criterion rejects by itself.

    A value is that of a token or of a sequence, as the statistic is. Bounds of k1 are logarithms.

    - `mean`: over tokens; `std`: over tokens, of the values clamped to the bounds (from 0 on for k2
      and k3).
    - `max`, `min`, `fraction_high`, `fraction_low`: over values; the last two are the shares above
      and below the bounds.
    - `seq_mean`, `seq_std`, `seq_max`, `seq_min`, `seq_max_deviation`, `seq_fraction_high` and, for
      k1, `seq_fraction_low`: the same over sequences, each with its value or the mean value of its
      tokens; `seq_max_deviation` is the largest size.
    - `masked_fraction`, `seq_masked_fraction`: the shares of tokens and of sequences rejected.
    """
    statistic = criterion.measure(log_ratio, mask)
    rejected = mask & ~criterion.keeps(statistic)
    values = statistic.double().expand(mask.shape)
    lower, upper = criterion.bounds

    of_sequences = masked_mean(values, mask, dim=1)[mask.any(dim=1)]
    of_units = selected(values, mask) if criterion.of_tokens else of_sequences
    within = local_moments(values.clamp(0.0 if lower is None else lower, upper), mask)

    metrics = {
        "mean": _mean(values, mask),
        "max": _max(of_units),
        "min": _min(of_units),
        "std": (within.centred_squares / within.count) ** 0.5 if within.count else math.nan,
        "fraction_high": _share(of_units > upper),
        "fraction_low": 0.0 if lower is None else _share(of_units < lower),
        "seq_max_deviation": _max(of_sequences.abs()),
        "seq_fraction_high": _share(of_sequences > upper),
        **_spread("seq", of_sequences),
        **_rejected_shares(rejected, mask),
    }
    if lower is not None:
        metrics["seq_fraction_low"] = _share(of_sequences < lower)
    return metrics


def _rejected_shares(rejected: Tensor, mask: Tensor) -> dict[str, float]:
    """The shares of tokens, and of sequences with at least one token, that were rejected."""
    return {
        "masked_fraction": _share(selected(rejected, mask)),
        "seq_masked_fraction": _share(rejected.any(dim=1)[mask.any(dim=1)]),
    }


def _spread(prefix: str, x: Tensor) -> dict[str, float]:
    """Mean, unbiased standard deviation, maximum and minimum of a flat tensor."""
    return {
        f"{prefix}_mean": float(x.mean()),
        f"{prefix}_std": _std(x),
        f"{prefix}_max": _max(x),
        f"{prefix}_min": _min(x),
    }


def _correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two flat tensors; NaN if one of them does not vary."""
    x = x - x.mean()
    y = y - y.mean()
    size = float(x.dot(x) * y.dot(y)) ** 0.5
    return float(x.dot(y)) / size if size else math.nan


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(masked_mean(values, mask)) if bool(mask.any()) else math.nan


def _share(true: Tensor) -> float:
    return float(true.double().mean())


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else math.nan


def _min(x: Tensor) -> float:
    return float(x.min()) if x.numel() else math.nan


def _std(x: Tensor) -> float:
    """Unbiased standard deviation of a flat tensor; 0 for one number."""
    if x.numel() < 2:
        return 0.0 if x.numel() else math.nan
    centred = x - x.mean()
    return float(centred.dot(centred) / (x.numel() - 1)) ** 0.5


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
