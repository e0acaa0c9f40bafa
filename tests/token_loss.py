"""The loss of all tokens, from a function that gives the loss of some of them; and the divergence
of two distributions, by its formula.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrlhf.parallel.vocab import LossPart, LossParts, OutputLayer, Tokens
from mrlhf.parallel.vocab_sums import NumbersToCompute, TokenNumbers


def token_loss(
    layer: OutputLayer,
    tokens: Tokens,
    wanted: NumbersToCompute,
    objective: Callable[[LossPart, TokenNumbers], Tensor],
    by_token: bool,
) -> Tensor:
    """Walk through the parts; `objective` gives the loss of each."""
    parts = LossParts(layer, tokens, wanted, by_token)
    for part in parts:
        parts.add(part, objective(part, part.numbers))
    return parts.total()


def divergence(
    log_p: Tensor,
    log_q: Tensor,
    beta: float,
    top_k: int | None = None,
    sharpness: float = 1.0,
) -> Tensor:
    """The divergence of https://arxiv.org/abs/2306.13649 from log-probabilities [tokens, vocab].

    Of both, the `top_k` likeliest tokens of the second count, taken to the power `sharpness`.
    """
    if top_k is not None:
        likeliest = log_q.topk(min(top_k, log_q.shape[1]), dim=1).indices
        log_p, log_q = log_p.gather(1, likeliest), log_q.gather(1, likeliest)
    log_p, log_q = ((sharpness * logs).log_softmax(dim=1) for logs in (log_p, log_q))
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return (q * (log_q - log_p)).sum(dim=1)
    if beta == 1:
        return (p * (log_p - log_q)).sum(dim=1)
    # A token that both cannot draw has no logarithm, and no share.
    log_m = torch.log((beta * q + (1 - beta) * p).clamp(min=torch.finfo(p.dtype).tiny))
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(dim=1)
