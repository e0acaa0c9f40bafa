"""The loss of all tokens, from a function that gives the loss of some of them."""

from __future__ import annotations

from collections.abc import Callable

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
