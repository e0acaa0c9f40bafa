"""Estimators of the KL divergence between two policies, and the controller of its coefficient.

The estimators see only the log-probabilities of the tokens that were drawn. The exact divergence
over the vocabulary (`full`) needs the logits and is computed where those are. This file does not
know whether the KL goes into the reward or into the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mrlhf.rl.masking import working_dtype
from mrlhf.rl.names import KlControllerKind, KlKind

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0
ADAPTIVE_ERROR_LIMIT = 0.2


def _k2(x: Tensor) -> Tensor:
    return 0.5 * x.square()


def _k3(x: Tensor) -> Tensor:
    d = (-x).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(d) - d).clamp(-K3_LIMIT, K3_LIMIT)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "kl": lambda x: x,
    "abs": torch.abs,
    "k2": _k2,
    "mse": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
    "k1_clamped": lambda x: x.clamp(min=0),
}


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: KlKind) -> Tensor:
    """Estimate KL(policy || reference) for each token that the policy drew.

    The estimators k1, k2, k3 are those of http://joschu.net/blog/kl-approx.html; `k1_clamped` is
    the one-sided penalty of AlpacaFarm, https://arxiv.org/abs/2305.14387. With a `+` the value is
    that of the base kind and the gradient that of k2. On average this is the gradient of the
    divergence; the gradients of k1 and k3 are not (https://arxiv.org/abs/2506.09477).

    `full` is refused, since the drawn tokens alone cannot give it. Both log-probabilities are those
    of the drawn tokens, [batch, response_len], and so is the result, in the wider `working_dtype`
    of the two.
    """
    assert kind != "full", (
        "'full' is summed over the vocabulary where the logits are, not estimated from log-probs"
    )
    assert logprob.shape == ref_logprob.shape, (
        f"{tuple(logprob.shape)} against {tuple(ref_logprob.shape)}"
    )

    x = logprob.to(working_dtype(logprob)) - ref_logprob.to(working_dtype(ref_logprob))
    value = _ESTIMATORS[kind.removesuffix("+")](x)
    if not kind.endswith("+"):
        return value

    straight_through = _k2(x)
    return value.detach() + (straight_through - straight_through.detach())


class KlController:
    """Holds the coefficient of the KL penalty from one step to the next.

    A `fixed` one stays as configured, also when a run is resumed with another one. An `adaptive`
    one grows while the KL is above its target and shrinks while it is below: the proportional
    control of https://arxiv.org/abs/1909.08593, section 2.2. Only it reads `target_kl` and
    `horizon`, in samples.
    """

    def __init__(
        self, kind: KlControllerKind, kl_coef: float, target_kl: float, horizon: float
    ) -> None:
        self.value = kl_coef
        self._adapts = kind == "adaptive"
        self._target_kl = target_kl
        self._horizon = horizon
        assert not self._adapts or (target_kl > 0 and horizon > 0), (
            f"target_kl {target_kl} and horizon {horizon} must be positive"
        )

    def update(self, current_kl: float, n_samples: int) -> None:
        """Take in a step in which `n_samples` responses had the mean KL `current_kl`.

        An adaptive coefficient is multiplied by 1 + (clipped relative error) x n_samples / horizon.
        """
        if not self._adapts:
            return
        assert math.isfinite(current_kl), f"KL {current_kl} would destroy the coefficient"
        error = current_kl / self._target_kl - 1
        error = min(max(error, -ADAPTIVE_ERROR_LIMIT), ADAPTIVE_ERROR_LIMIT)
        self.value *= 1 + error * n_samples / self._horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient reached."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient of either kind of controller, unless it is fixed."""
        if self._adapts:
            self.value = state["value"]
