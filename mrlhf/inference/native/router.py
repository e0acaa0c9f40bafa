"""The router of a mixture: which experts each token goes to, and what their outputs count.

It computes in float32 whatever the model's dtype is: rounded scores would choose other experts. On
a host it is one compiled call (`router.cpp`). This file knows no experts and no ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrlhf.compiled.library import functions_of, load_library
from mrlhf.inference.native.linear import HostLinear, Product, linear
from mrlhf.models.spec import Experts

SOURCE = Path(__file__).with_name("router.cpp")
_SIGNATURE = "pppp i n"
_SMALLEST_SUM = 1e-20  # scores that are all 0 must not become NaN

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The experts of each of x [tokens, hidden] and their shares: the numbers of the experts, int64
[tokens, per_token], and what the output of each is multiplied by, float32 [tokens, per_token]."""


class RouterPart(ctypes.Structure):
    """The router of one layer for compiled code, as in `router.cpp`."""

    _fields_ = (
        ("logits", Product),
        ("correction", ctypes.c_void_p),
        ("experts", ctypes.c_int64),
        ("per_token", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("groups_per_token", ctypes.c_int64),
        ("sigmoid", ctypes.c_int),
        ("normalised", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("smallest_sum", ctypes.c_float),
    )


class HostRouter:
    """The router of one layer in one compiled call.

    Attributes:
        route: the compiled function.
        part: its first argument, as long as this object lives.
    """

    def __init__(
        self, library: ctypes.CDLL, experts: Experts, logits: HostLinear, correction: Tensor | None
    ) -> None:
        """Write down where everything is, as `make_router`; `library` is `router.cpp`."""
        self.route: Any = functions_of(library, {"route": _SIGNATURE}, torch.float32)["route"]
        self._per_token = experts.per_token
        self._memory = (logits, correction)  # what is pointed at lives as long
        self.part = RouterPart(
            logits=logits.product,
            correction=None if correction is None else correction.data_ptr(),
            experts=experts.count,
            per_token=experts.per_token,
            groups=experts.groups,
            groups_per_token=experts.groups_per_token,
            sigmoid=experts.scoring == "sigmoid",
            normalised=experts.normalised,
            scale=experts.scale,
            smallest_sum=_SMALLEST_SUM,
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts and their shares, as `Router` says."""
        x = x.float().contiguous()
        tokens = x.shape[0]
        chosen = torch.empty((tokens, self._per_token), dtype=torch.int64)
        shares = torch.empty((tokens, self._per_token), dtype=torch.float32)
        self.route(
            ctypes.addressof(self.part), x.data_ptr(), chosen.data_ptr(), shares.data_ptr(),
            tokens, torch.get_num_threads(),
        )  # fmt: skip
        return chosen, shares


def make_router(experts: Experts, weight: Tensor, correction: Tensor | None) -> Router:
    """The fastest router that this machine has for one layer.

    Args:
        experts: how experts are chosen.
        weight: [experts, hidden].
        correction: what is added to the scores for the choice, [experts], if anything is.
    """
    logits = linear(weight.float())
    correction = None if correction is None else correction.float()
    library = _library() if weight.device.type == "cpu" else None
    if library is not None and isinstance(logits, HostLinear):
        return HostRouter(library, experts, logits, correction)
    return lambda x: choose(experts, correction, logits(x.float()))


def choose(experts: Experts, correction: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    """What a `Router` returns for the logits, float32 [tokens, experts], on torch's operators."""
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
