"""Which tokens DPPO, https://arxiv.org/abs/2602.04879, goes on learning from: those whose
probability may still move.

The vocabulary is reduced to two events, the drawn token and everything else, so that a divergence
between the old policy and the current one can be had from the log-probabilities of the drawn tokens
alone. A token is left alone once the divergence is beyond its bound, unless the update would bring
the policies closer again. This file does not know the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.rl.kl import LOG_RATIO_LIMIT

PROBABILITY_EPS = 1e-8


def inside_total_variation(
    logprob: Tensor, old_logprob: Tensor, advantages: Tensor, bound_low: float, bound_high: float
) -> Tensor:
    """Whether the probability has not risen by more than `bound_high` where A > 0, nor fallen by
    `bound_low` elsewhere.

    Args:
        logprob: [batch, response_len], under the policy being trained.
        old_logprob: [batch, response_len], before this step's updates.
        advantages: [batch, response_len].
        bound_low: how far a probability may fall.
        bound_high: how far it may rise.

    Returns:
        bool [batch, response_len].
    """
    moved = logprob.detach().exp() - old_logprob.detach().exp()
    return torch.where(advantages > 0, moved <= bound_high, moved >= -bound_low)


def inside_binary_kl(
    logprob: Tensor, old_logprob: Tensor, advantages: Tensor, bound_low: float, bound_high: float
) -> Tensor:
    """Whether the KL(old || current) of the two events is within its bound, or the probability
    moved against A.

    Args:
        logprob: [batch, response_len], under the policy being trained.
        old_logprob: [batch, response_len], before this step's updates.
        advantages: [batch, response_len].
        bound_low: the largest divergence, in nats, at which a probability may fall further.
        bound_high: the largest at which it may rise further.

    Returns:
        bool [batch, response_len].
    """
    logprob, old_logprob = logprob.detach(), old_logprob.detach()
    prob, old_prob = logprob.exp(), old_logprob.exp()
    others, old_others = _others(logprob), _others(old_logprob)
    drawn = old_prob * (old_logprob - logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    divergence = drawn + (1 - old_prob) * (old_others / others).log()
    may_rise = (divergence <= bound_high) | (prob <= old_prob)
    may_fall = (divergence <= bound_low) | (prob >= old_prob)
    return torch.where(advantages > 0, may_rise, may_fall)


def _others(logprob: Tensor) -> Tensor:
    # expm1 keeps the digits that 1 - exp loses near probability 1, where rounding may also exceed
    # it.
    return (-torch.expm1(logprob)).clamp(min=0) + PROBABILITY_EPS
