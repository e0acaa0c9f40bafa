"""The router of a mixture: which experts each token goes to, and what their outputs count.

It computes in float32 whatever the model's dtype is: rounded scores would choose other experts. On
a host the choice is compiled (`router.cpp`). This file knows no experts and no ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.compiled.library import functions_of, load_library, threads_for
from mrlhf.inference.native.linear import linear
from mrlhf.models.spec import Experts

SOURCE = Path(__file__).with_name("router.cpp")
_SIGNATURE = "pppp iiiii nn ff n"
_SMALLEST_SUM = 1e-20  # scores that are all 0 must not become NaN


Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The experts and shares that `Router` returns, for logits float32 [tokens, experts]."""


class Router:
    """The router of one layer."""

    def __init__(self, experts: Experts, weight: Tensor, correction: Tensor | None) -> None:
        """Lay the weight out.

        Args:
            experts: how experts are chosen.
            weight: [experts, hidden].
            correction: what is added to the scores for the choice, [experts], if anything is.
        """
        self._logits = linear(weight.float())
        correction = None if correction is None else correction.float()
        library = _library() if weight.device.type == "cpu" else None
        self._choose: Choose = partial(choose, experts, correction)
        if library is not None:
            self._choose = HostChoice(library, experts, correction)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their shares.

        Args:
            hidden: [tokens, hidden].

        Returns:
            The numbers of the experts, int64 [tokens, per_token], and what the output of each is
            multiplied by, float32 [tokens, per_token].
        """
        return self._choose(self._logits(hidden.float()))


class HostChoice:
    """The choice of experts on a compiled kernel."""

    def __init__(self, library: ctypes.CDLL, experts: Experts, correction: Tensor | None) -> None:
        """Keep the rule; `library` is `router.cpp`."""
        self._route: Any = functions_of(library, {"route": _SIGNATURE}, torch.float32)["route"]
        self._experts = experts
        self._correction = correction

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What `choose` returns."""
        experts = self._experts
        tokens = logits.shape[0]
        chosen = torch.empty((tokens, experts.per_token), dtype=torch.int64)
        shares = torch.empty((tokens, experts.per_token), dtype=torch.float32)
        correction = None if self._correction is None else self._correction.data_ptr()

        self._route(
            logits.data_ptr(), correction, chosen.data_ptr(), shares.data_ptr(),
            tokens, experts.count, experts.per_token, experts.groups, experts.groups_per_token,
            experts.scoring == "sigmoid", experts.normalised, experts.scale, _SMALLEST_SUM,
            threads_for(logits.numel()),
        )  # fmt: skip
        return chosen, shares


def choose(experts: Experts, correction: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    """What `Router` returns for the logits, on torch's operators."""
    scores = logits.softmax(dim=-1) if experts.scoring == "softmax" else logits.sigmoid()

    rank_by = scores if correction is None else scores + correction
    if experts.groups > 1:
        rank_by = _of_best_groups(rank_by, experts)
    chosen = rank_by.topk(experts.per_token, dim=-1).indices

    shares = scores.gather(-1, chosen)
    if experts.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
    return chosen, shares if experts.scale == 1.0 else shares * experts.scale


def _of_best_groups(scores: Tensor, experts: Experts) -> Tensor:
    """The scores [tokens, experts] with -inf for the experts outside of each token's best groups.

    A group is as good as the sum of its two best scores.
    """
    by_group = scores.unflatten(-1, (experts.groups, -1))
    goodness = by_group.topk(2, dim=-1).values.sum(dim=-1)
    best = goodness.topk(experts.groups_per_token, dim=-1).indices

    is_left_out = torch.ones_like(goodness, dtype=torch.bool).scatter(-1, best, False)
    return by_group.masked_fill(is_left_out[..., None], -float("inf")).flatten(-2)


@cache
def _library() -> ctypes.CDLL | None:
    return load_library(SOURCE, "the engine's router")
