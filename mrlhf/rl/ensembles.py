"""One score of a response from those of several reward models: https://arxiv.org/abs/2310.02743.

A policy is not to gain by what only one of them pays for. It knows neither models nor responses.
"""

from __future__ import annotations

from torch import Tensor

from mrlhf.rl.names import Combine


def combine_scores(name: Combine, scores: Tensor, coefficient: float) -> Tensor:
    """One score from those of all models, float32 [models, batch] -> [batch].

    `min` is the paper's worst-case optimisation; its uncertainty-weighted one takes off
    `coefficient` times the variance, `mean_minus_std` that many standard deviations.
    """
    mean = scores.double().mean(0)
    combined = {
        "mean": mean,
        "min": scores.amin(0),
        "mean_minus_std": mean - coefficient * spread_of(scores).double(),
        "mean_minus_variance": mean - coefficient * spread_of(scores).double().square(),
    }
    return combined[name].float()


def spread_of(scores: Tensor) -> Tensor:
    """The standard deviation of these models' scores, float32 [models, batch] -> [batch]."""
    return scores.double().std(0, unbiased=False).float()
