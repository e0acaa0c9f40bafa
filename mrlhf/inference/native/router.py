"""The router of a mixture: the experts of each token, and the factors of their outputs.

It computes in float32 whatever the model's dtype is, since rounded scores would choose other
experts. What a token gets does not depend on the other tokens. It knows no experts and no ranks.
"""

from __future__ import annotations

from torch import Tensor

from mrlhf.inference.native.linear import linear
from mrlhf.models.expert_choice import SMALLEST_SUM, chosen_experts
from mrlhf.models.spec import Experts


class Router:
    """The router of one layer.

    `weight` is [experts, hidden]. `correction` [experts] is added to scores for the choice alone.
    """

    def __init__(self, experts: Experts, weight: Tensor, correction: Tensor | None) -> None:
        self._experts = experts
        self._logits = linear(weight.float())
        self._correction = None if correction is None else correction.float()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each of x [tokens, hidden], and their shares.

        Returns:
            The numbers of the experts, int64 [tokens, per_token], and the factor of each expert's
            output, float32 [tokens, per_token].
        """
        return choose(self._experts, self._correction, self._logits(x.float()))


def choose(experts: Experts, correction: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a `Router` returns, from the logits, float32 [tokens, experts]."""
    scores = logits.softmax(dim=-1) if experts.scoring == "softmax" else sigmoid(logits)
    chosen = chosen_experts(scores, correction, experts)

    shares = scores.gather(-1, chosen)
    if experts.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return chosen, shares if experts.scale == 1.0 else shares * experts.scale


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), with a rounding that does not depend on how many numbers there are."""
    # torch.sigmoid computes the last few numbers of a tensor by another function than the others.
    return 1 / (1 + (-x).exp())
