"""The trust region of DPPO, https://arxiv.org/abs/2602.04879: which tokens may still be learned
from.

The vocabulary is reduced to two events, the drawn token and everything else. So the divergence
between the old policy and the current one follows from the log-probabilities of the drawn tokens
alone, [batch, response_len]. Once it is beyond its bound, the token is not learned from, unless the
update would bring the policies closer again. This file does not know the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.rl.kl import LOG_RATIO_LIMIT

PROBABILITY_EPS = 1e-8


def inside_total_variation(
    logprob: Tensor, old_logprob: Tensor, advantages: Tensor, bound_low: float, bound_high: float
) -> Tensor:
    """Whether each token's probability rose by no more than its bound (A > 0), or fell so; bool."""
    moved = logprob.detach().exp() - old_logprob.detach().exp()
    return torch.where(advantages > 0, moved <= bound_high, moved >= -bound_low)


def inside_binary_kl(
    logprob: Tensor, old_logprob: Tensor, advantages: Tensor, bound_low: float, bound_high: float
) -> Tensor:
    """Whether KL(old || current) of the two events is within its bound, in nats; bool, as
    `logprob`.

    It is also True where the probability moved against A, since an update would bring the policies
    closer. `bound_low` is for a probability that may fall further, `bound_high` for one that may
    rise.
    """
    logprob = logprob.detach()
    old_logprob = old_logprob.detach()
    prob = logprob.exp()
    old_prob = old_logprob.exp()

    drawn = old_prob * (old_logprob - logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    others = (1 - old_prob) * (_other_prob(old_logprob) / _other_prob(logprob)).log()
    divergence = drawn + others

    may_rise = (divergence <= bound_high) | (prob <= old_prob)
    may_fall = (divergence <= bound_low) | (prob >= old_prob)
    return torch.where(advantages > 0, may_rise, may_fall)


def _other_prob(logprob: Tensor) -> Tensor:
    """The probability of everything but the drawn token, at least 1e-8."""
    # expm1 keeps the digits that 1 - exp loses near probability 1. Rounding may exceed 1 there.
    return (-torch.expm1(logprob)).clamp(min=0) + PROBABILITY_EPS
