"""Metrics of the mismatch between the engine that drew the responses and the trained policy.

Every number is taken over the whole batch: over the tokens of its mask, or over the sequences that
have at least one. Where there is nothing to count, the number is NaN. This file does not know which
of the trainer's policies is meant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrlhf.rl.correction import Corrected, Correction, truncate
from mrlhf.rl.kl import LOG_RATIO_LIMIT
from mrlhf.rl.masking import masked_mean, masked_sum

MEAN_EPS = 1e-8


def mismatch_metrics(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """Divergences and perplexities of the trainer's policy against the engine's.

    - `kl`, `k3_kl`: estimates of KL(engine || trainer) a token.
    - `training_ppl`, `rollout_ppl`: means of the sequences' perplexities.
    - `log_ppl_diff`: mean difference of their logarithms, trainer less engine.
    - `ppl_ratio`: mean of their quotients.
    - `chi2_token`, `chi2_seq`: the mean square of the probability ratio, trainer over engine, of a
      token and of a whole sequence, less 1.

    Args:
        trainer_logprobs: [batch, response_len].
        rollout_logprobs: [batch, response_len], as the engine returned them.
        mask: bool [batch, response_len].
    """
    trainer = torch.where(mask, trainer_logprobs.detach().double(), 0)
    rollout = torch.where(mask, rollout_logprobs.detach().double(), 0)
    log_ratio = trainer - rollout
    sequence_log_ratio = _clamped(masked_sum(log_ratio, mask, dim=1))

    rows = mask.any(dim=1)
    log_ppl = -masked_mean(trainer, mask, dim=1)
    rollout_log_ppl = -masked_mean(rollout, mask, dim=1)
    log_ppl_diff = log_ppl - rollout_log_ppl

    return {
        "kl": _mean(-log_ratio, mask),
        "k3_kl": _mean(log_ratio.clamp(max=LOG_RATIO_LIMIT).exp() - 1 - log_ratio, mask),
        "training_ppl": _mean(log_ppl.exp(), rows),
        "rollout_ppl": _mean(rollout_log_ppl.exp(), rows),
        "log_ppl_diff": _mean(log_ppl_diff, rows),
        "ppl_ratio": _mean(log_ppl_diff.exp(), rows),
        "chi2_token": _mean((2 * _clamped(log_ratio)).exp(), mask) - 1,
        "chi2_seq": _mean((2 * sequence_log_ratio).exp(), rows) - 1,
    }


def weight_metrics(
    corrected: Corrected, correction: Correction, log_ratio: Tensor, mask: Tensor
) -> dict[str, float]:
    """Statistics of the weights before any normalisation; empty where there are no weights.

    - `rollout_is_mean`, `std`, `eff_sample_size`: over tokens, of truncated weights; the last one
      is a share of the tokens, and 0 where all weights are 0.
    - `max`, `min`: of truncated weights at the token level, of raw ones at the sequence level.
    - `ratio_fraction_high`, `ratio_fraction_low`: the share of tokens or sequences whose raw weight
      is above `correction.upper`, or below `correction.lower` (1 / upper where that is None).

    Args:
        corrected: the result of `correct` for the other arguments.
        correction: as given to `correct`.
        log_ratio: [batch, response_len], trainer less engine.
        mask: bool [batch, response_len].
    """
    if corrected.raw is None:
        return {}

    raw = corrected.raw.double()
    weights = truncate(raw, correction)
    mean = _mean(weights, mask)
    mean_square = _mean(weights.square(), mask)

    if correction.level == "sequence":
        counted = mask.any(dim=1)
        ratios = raw.amax(dim=1)
        # Not from `raw`, whose clamp would hide how small the smallest is.
        sequence_log_ratio = masked_sum(log_ratio.detach().double(), mask, dim=1)
        extremes = sequence_log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()[counted]
    else:
        counted = mask
        ratios = raw
        extremes = weights[mask]

    lower = 1 / correction.upper if correction.lower is None else correction.lower
    return {
        "rollout_is_mean": mean,
        "rollout_is_max": float(extremes.max()) if extremes.numel() else math.nan,
        "rollout_is_min": float(extremes.min()) if extremes.numel() else math.nan,
        "rollout_is_std": _mean((weights - mean).square(), mask) ** 0.5,
        "rollout_is_eff_sample_size": (mean + MEAN_EPS) ** 2 / mean_square if mean_square else 0.0,
        "rollout_is_ratio_fraction_high": _mean((ratios > correction.upper).double(), counted),
        "rollout_is_ratio_fraction_low": _mean((ratios < lower).double(), counted),
    }


def rejection_metrics(corrected: Corrected, mask: Tensor) -> dict[str, float]:
    """The shares of tokens that were rejected, and of sequences that lost at least one token.

    Args:
        corrected: the result of `correct`.
        mask: bool [batch, response_len], as given to `correct`.
    """
    rejected = mask & ~corrected.kept
    return {
        "rollout_rs_masked_fraction": _mean(rejected.double(), mask),
        "rollout_rs_seq_masked_fraction": _mean(rejected.any(dim=1).double(), mask.any(dim=1)),
    }


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(masked_mean(values, mask)) if bool(mask.any()) else math.nan


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
