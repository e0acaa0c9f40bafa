"""Correction for the difference between the engine's policy and the policy that is trained.

Importance weights turn an expectation over the engine's policy into one over the trainer's.
Rejection leaves out tokens or sequences on which the two disagree too much. Both are computed from
one log-ratio, trainer minus engine: `log_ratio` [batch, response_len], with a bool `mask` of the
same shape. This file does not know which of the trainer's policies is meant, the one before the
step or the current one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mrlhf.rl.kl import LOG_RATIO_LIMIT
from mrlhf.rl.masking import masked_mean, masked_sum, working_dtype
from mrlhf.rl.names import Statistic, WeightLevel

NO_WEIGHT = 1e-8
LEAST_TAIL = 1e-5
GEOMETRIC_EPS = 1e-10


@dataclass(frozen=True)
class Criterion:
    """A condition that a token, or its whole sequence, must satisfy to be kept."""

    # the estimator of the divergence, and whether it is of a token or of a sequence
    statistic: Statistic
    # k1: the smallest probability ratio, engine over trainer, that is kept; None for k2 and k3
    lower: float | None
    upper: float  # k1: the largest such ratio; k2 and k3: the largest divergence, in nats

    def __post_init__(self) -> None:
        k1 = self.statistic.endswith("k1")
        assert k1 == (self.lower is not None), (
            f"{self.statistic}: a lower bound is for k1, and k1 needs one"
        )

    @property
    def of_tokens(self) -> bool:
        """Whether each token has a value of the statistic, and not each sequence."""
        return self.statistic.startswith("token_")

    @property
    def bounds(self) -> tuple[float | None, float]:
        """The smallest value of the statistic that is kept, or None, and the largest."""
        if self.lower is None:
            return None, self.upper
        return math.log(self.lower), math.log(self.upper)

    def measure(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The statistic of each token [batch, response_len], or sequence [batch, 1]; else 0."""
        reduction, estimator = self.statistic.rsplit("_", 1)
        divergence = _ESTIMATORS[estimator](_clamped(masked_log_ratio(log_ratio, mask)))
        return _REDUCTIONS[reduction](divergence, mask)

    def keeps(self, statistic: Tensor) -> Tensor:
        """Whether each value from `measure` is within the bounds; bool, of the same shape."""
        lower, upper = self.bounds
        below = statistic <= upper
        return below if lower is None else below & (statistic >= lower)


@dataclass(frozen=True)
class Correction:
    """Which weights are given, and what is rejected."""

    # `token`: a token's weight is its probability ratio; `sequence`: all tokens of a sequence have
    # the product of their ratios; None: there are no weights
    level: WeightLevel | None
    # weights outside [lower, upper] become 0; None: those above `upper` become `upper`
    lower: float | None
    upper: float  # the largest weight
    normalise: bool  # divide the weights by their mean
    criteria: tuple[Criterion, ...]  # a token is kept if all of them hold


@dataclass(frozen=True)
class Corrected:
    """The weights and the rejection of a batch; each [batch, response_len], without gradient."""

    # factors of the policy loss, 0 outside the mask; None if the correction has none
    weights: Tensor | None
    kept: Tensor  # bool, the mask without the rejected tokens
    # the weights before truncation and normalisation, 0 outside the mask, or None
    raw: Tensor | None


def correct(log_ratio: Tensor, mask: Tensor, correction: Correction) -> Corrected:
    """Compute weights and rejection.

    Truncated weights are those of https://fengyao.notion.site/off-policy-rl, weights that are 0
    outside a band those of IcePop, https://arxiv.org/abs/2510.18855. Weights do not depend on what
    is rejected. Without `normalise`, each row depends on itself alone.
    """
    log_ratio = masked_log_ratio(log_ratio, mask)

    kept = mask
    for criterion in correction.criteria:
        kept = kept & criterion.keeps(criterion.measure(log_ratio, mask))

    if correction.level is None:
        return Corrected(weights=None, kept=kept, raw=None)
    raw = _raw_weights(log_ratio, mask, correction.level)
    weights = truncate(raw, correction)
    if correction.normalise:
        weights = weights / normalisation_factor(weights, mask, correction.level)
    return Corrected(weights=weights, kept=kept, raw=raw)


@dataclass(frozen=True)
class Centring:
    """What centres the scores at some tokens; each [...], the shape of the tokens."""

    # the engine's mean of a token's weight times log p, whose gradient is the mean of the scores;
    # p is the current policy, and the tail's part is left out, which has no gradient
    mean: Tensor
    engine_mass: Tensor  # the engine's probability of the head, without gradient
    policy_mass: Tensor  # the current policy's


def centre_scores(logprobs: Tensor, engine: Tensor, correction: Correction) -> Centring:
    """The engine's mean of the weighted scores, over its whole distribution.

    With q the engine's distribution, w(p / q) the weights and p the current policy, the mean of
    w d log p under q is 0 if p = q, and else moves the policy whatever was rewarded. The head has
    the tokens of which q is known; of the tail, q is taken to be a p, a = (1 - q(head)) /
    (1 - p(head)). So the mean is the sum over the head of (q w(p / q) - a w(1 / a) p) d log p,
    https://arxiv.org/abs/2609.20807.

    Args:
        logprobs: log p of the head's tokens, [..., head].
        engine: log q of them; -inf where there is no token.
        correction: of tokens or without weights, and not normalised.
    """
    assert correction.level != "sequence" and not correction.normalise
    known = engine > -torch.inf
    log_p = logprobs.detach().double()
    log_q = engine.double()
    p = torch.where(known, log_p.exp(), 0.0)
    q = log_q.exp()
    p_mass, q_mass = p.sum(dim=-1), q.sum(dim=-1)
    p_tail, q_tail = 1 - p_mass, 1 - q_mass
    # What rounding leaves of a mass of 1 is no tail.
    has_tail = (p_tail > LEAST_TAIL) & (q_tail > LEAST_TAIL)
    tail_ratio = torch.where(has_tail, q_tail, 1.0) / torch.where(has_tail, p_tail, 1.0)

    def weights(log_ratio: Tensor) -> Tensor:
        if correction.level is None:
            return torch.ones_like(log_ratio)
        return truncate(_clamped(log_ratio).exp(), correction)

    of_head = q * weights(torch.where(known, log_p - log_q, 0.0))
    of_tail = (tail_ratio * weights(-tail_ratio.log()))[..., None] * p
    factors = torch.where(known, of_head - of_tail, 0.0).to(logprobs.dtype)
    mean = (factors * torch.where(known, logprobs, 0.0)).sum(dim=-1)
    return Centring(mean, q_mass.to(logprobs.dtype), p_mass.to(logprobs.dtype))


def masked_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio without its gradient, in its `working_dtype`, 0 outside the mask."""
    return torch.where(mask, log_ratio.detach().to(working_dtype(log_ratio)), 0)


def normalisation_factor(weights: Tensor, mask: Tensor, level: WeightLevel) -> Tensor:
    """The mean of truncated weights, over tokens or sequences; 1 if all weights are about 0."""
    if level == "sequence":
        mean = masked_mean(masked_mean(weights, mask, dim=1), mask.any(dim=1))
    else:
        mean = masked_mean(weights, mask)
    return torch.where(mean > NO_WEIGHT, mean, 1)


def truncate(raw: Tensor, correction: Correction) -> Tensor:
    """Raw weights [batch, response_len], cut to `correction.upper`, or zeroed outside its band."""
    if correction.lower is None:
        return raw.clamp(max=correction.upper)
    return torch.where((raw >= correction.lower) & (raw <= correction.upper), raw, 0)


def geometric_mean_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Each row's geometric mean over its mask, for `geo_mean`; [batch, response_len]."""
    mean = masked_mean((weights + GEOMETRIC_EPS).log(), mask, dim=1).exp()
    return torch.where(mask, mean[:, None], 0)


def _raw_weights(log_ratio: Tensor, mask: Tensor, level: WeightLevel) -> Tensor:
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=1)[:, None]
    return torch.where(mask, _clamped(log_ratio).exp(), 0)


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# Estimators of KL(engine || trainer). Their argument is the log-ratio, trainer minus engine.
# http://joschu.net/blog/kl-approx.html
_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(x) - x,
}
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "seq_sum": lambda values, mask: masked_sum(values, mask, dim=1)[:, None],
    "seq_mean": lambda values, mask: masked_mean(values, mask, dim=1)[:, None],
    # k2 and k3 are at least 0, and 0 outside the mask, so the maximum needs no mask. The zero
    # appended to each row is the maximum of a row without tokens.
    "seq_max": lambda values, mask: pad(values, (0, 1)).amax(dim=1, keepdim=True),
}
