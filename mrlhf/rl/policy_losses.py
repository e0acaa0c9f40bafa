"""The policy losses: each is a pure function of log-probabilities and advantages and gives one loss
a token.

They do not know how tokens are summed, nor the weights that correct for the engine that drew the
tokens: the caller multiplies `per_token` by those weights before it aggregates.

Throughout, d is the log-ratio logp - old, clamped to +-20, r = e^d, A the advantage, and sg stops
the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrlhf.errors import ConfigError
from mrlhf.rl.kl import LOG_RATIO_LIMIT
from mrlhf.rl.masking import masked_mean, working_dtype
from mrlhf.rl.names import PolicyLossName
from mrlhf.rl.trust_region import inside_binary_kl, inside_total_variation

SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True)
class PolicyLossInputs:
    """The tensors that a policy loss is computed from; each field [batch, response_len]."""

    logprob: Tensor  # log-probabilities of the drawn tokens under the policy that is trained
    old_logprob: Tensor  # the same before this step's updates
    advantages: Tensor  # the advantages of the drawn tokens
    mask: Tensor  # bool, the tokens that count; the other fields may hold anything elsewhere
    # bool, the choice of `select_by_covariance` over the whole mini-batch; `clip_cov` and `kl_cov`
    # need it
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprob.shape
        assert shape == self.old_logprob.shape == self.advantages.shape == self.mask.shape
        assert self.selected is None or self.selected.shape == shape
        assert self.mask.dtype == torch.bool, f"masks are bool, this one is {self.mask.dtype}"

    @property
    def log_ratio(self) -> Tensor:
        """logprob - old_logprob, clamped to +-20; [batch, response_len]."""
        return (self.logprob - self.old_logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class PolicyLossOptions:
    """The numbers of the losses."""

    # the ratio is clipped from below at 1 - clip_low; for `geo_mean` d at -clip_low; for `dppo_*`
    # the divergence at which a probability may fall no further
    clip_low: float = 0.2
    clip_high: float = 0.2  # the same from above, at 1 + clip_high
    # `vanilla`: bound > 1 on the loss of a token with a negative advantage, in units of that
    # advantage; `dppo_*`: the largest ratio that a token is weighted with
    clip_c: float = 3.0
    tau_pos: float = 1.0  # sharpness of `sapo`'s gate where A > 0
    tau_neg: float = 1.05  # sharpness elsewhere
    ppo_kl_coef: float = 0.1  # weight of |d| at the tokens that `kl_cov` selected


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and its measurements; each field [batch, response_len]."""

    per_token: Tensor  # the loss, to be aggregated; 0 outside the mask
    approx_kl: Tensor  # -d, whose mean estimates KL(old || current)
    clipped: Tensor  # bool, whether the clip of the loss was taken; each loss says what that means
    clipped_lower: Tensor  # bool, whether the second clip of the loss was taken


def make_policy_loss(
    inputs: PolicyLossInputs,
    per_token: Tensor,
    clipped: Tensor | None = None,
    clipped_lower: Tensor | None = None,
) -> PolicyLoss:
    """The result of a policy loss; a clip that is left out counts as never taken.

    All tensors are [batch, response_len]: the loss of each token, and bool, where its clip and its
    second clip were taken.
    """
    nowhere = torch.zeros_like(inputs.mask)
    return PolicyLoss(
        per_token=per_token,
        approx_kl=-inputs.log_ratio.detach(),
        clipped=nowhere if clipped is None else clipped,
        clipped_lower=nowhere if clipped_lower is None else clipped_lower,
    )


PolicyLossFunction = Callable[[PolicyLossInputs, PolicyLossOptions], PolicyLoss]


def policy_loss(
    function: PolicyLossFunction, inputs: PolicyLossInputs, options: PolicyLossOptions
) -> PolicyLoss:
    """The loss that `function` computes from clean inputs.

    The function sees 0 outside the mask, even where NaN stood, and floating-point numbers of at
    least 32 bits.

    Raises:
        ValueError: the loss needs `inputs.selected`, which is None.
        ConfigError: a user's function did not return a PolicyLoss of the shape of its inputs.
    """
    mask = inputs.mask
    clean = replace(
        inputs,
        logprob=_clean(inputs.logprob, mask),
        old_logprob=_clean(inputs.old_logprob, mask),
        advantages=_clean(inputs.advantages, mask),
        selected=None if inputs.selected is None else inputs.selected & mask,
    )

    result = function(clean, options)
    if not isinstance(result, PolicyLoss):
        raise ConfigError(
            f"the policy loss returned a {type(result).__name__}, not a PolicyLoss; end the "
            "function with `return make_policy_loss(inputs, per_token)`"
        )
    if result.per_token.shape != mask.shape:
        raise ConfigError(
            f"the policy loss returned per_token of shape {tuple(result.per_token.shape)}; it must "
            f"have the shape of its inputs, {tuple(mask.shape)}"
        )
    return result


def vanilla(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """PPO's max(-A r, -A clip(r)), at most -A c where A < 0 (dual clip).

    The clip is that of https://arxiv.org/abs/1707.06347, the dual clip that of
    https://arxiv.org/abs/1912.09729. `clipped`: the clipped term is the larger one.
    `clipped_lower`: the dual clip was taken.
    """
    assert options.clip_c > 1, (
        f"clip_c {options.clip_c} <= 1 would cut into the region that PPO leaves unclipped"
    )
    ratio = inputs.log_ratio.exp()
    loss, clipped = _clipped_surrogate(inputs.advantages, ratio, options)

    bound = -inputs.advantages * options.clip_c
    negative = inputs.advantages < 0
    per_token = torch.where(negative, torch.minimum(loss, bound), loss)
    return make_policy_loss(inputs, per_token, clipped, negative & (loss > bound))


def gspo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """PPO's clipped loss, without a dual clip, on the ratio exp(mean d) of the whole sequence.

    The method is that of https://arxiv.org/abs/2507.18071. The gradient reaches each token by logp
    - sg(logp), so a token's own advantage weights its own gradient.
    """
    sequence = masked_mean(inputs.log_ratio, inputs.mask, dim=1).detach()
    log_ratio = inputs.logprob - inputs.logprob.detach() + sequence[:, None]
    ratio = log_ratio.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    per_token, clipped = _clipped_surrogate(inputs.advantages, ratio, options)
    return make_policy_loss(inputs, per_token, clipped)


def cispo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """-sg(clip(r)) A logp, https://arxiv.org/abs/2506.13585; `clipped`: the clip changed r."""
    ratio = inputs.log_ratio.exp().detach()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return make_policy_loss(inputs, -weight * inputs.advantages * inputs.logprob, ratio != weight)


def sapo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a gate and no clip, https://arxiv.org/abs/2511.20347."""
    ratio = inputs.log_ratio.exp()
    tau = torch.full_like(inputs.advantages, options.tau_neg)
    tau = tau.masked_fill(inputs.advantages > 0, options.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return make_policy_loss(inputs, -gate * inputs.advantages)


def reinforce(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """-A logp, also the loss of GPG; the caller's importance weights make it exact off-policy."""
    return make_policy_loss(inputs, -inputs.advantages * inputs.logprob)


def surrogate(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """-A r, unclipped: conservative policy iteration, https://arxiv.org/abs/1502.05477."""
    return make_policy_loss(inputs, -inputs.advantages * inputs.log_ratio.exp())


def geo_mean(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """-A exp(mean of the clipped d) of the whole sequence at each of its tokens.

    The method is that of https://arxiv.org/abs/2507.20673. d is clipped to [-clip_low, clip_high]
    where that lowers A d, and A is its mean over the row. `clipped`: the clamp changed d where
    A > 0; `clipped_lower`: where A < 0.
    """
    log_ratio = inputs.log_ratio
    clamped = log_ratio.clamp(-options.clip_low, options.clip_high)
    sign = inputs.advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clamped)

    ratio = masked_mean(pessimistic, inputs.mask, dim=1).exp()
    advantage = masked_mean(inputs.advantages, inputs.mask, dim=1)
    of_sequence = (-advantage * ratio)[:, None].expand(inputs.mask.shape)
    per_token = torch.where(inputs.mask, of_sequence, 0)

    changed = log_ratio != clamped
    raised = changed & (inputs.advantages > 0)
    lowered = changed & (inputs.advantages < 0)
    return make_policy_loss(inputs, per_token, clipped=raised, clipped_lower=lowered)


def clip_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """Clip-Cov, https://arxiv.org/abs/2505.22617: max(-A r, -A clip(r)), 0 at the selected tokens.

    `clipped`: the selected tokens alone, not those that PPO's clip took.
    """
    selected = _selected(inputs, "clip_cov")
    ratio = inputs.log_ratio.exp()
    loss, _ = _clipped_surrogate(inputs.advantages, ratio, options)
    return make_policy_loss(inputs, loss.masked_fill(selected, 0), selected)


def kl_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """KL-Cov, https://arxiv.org/abs/2505.22617: -A r, + ppo_kl_coef |d| at the selected tokens."""
    selected = _selected(inputs, "kl_cov")
    log_ratio = inputs.log_ratio
    penalty = torch.where(selected, options.ppo_kl_coef * log_ratio.abs(), 0)
    return make_policy_loss(inputs, -inputs.advantages * log_ratio.exp() + penalty)


def dppo_tv(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """DPPO by total variation: -sg(min(r, c)) A logp inside the trust region, 0 outside.

    https://arxiv.org/abs/2602.04879. `clipped`: outside; `clipped_lower`: inside, and r was cut.
    """
    valid = inside_total_variation(
        inputs.logprob, inputs.old_logprob, inputs.advantages, options.clip_low, options.clip_high
    )
    return _inside_trust_region(inputs, options, valid)


def dppo_kl(inputs: PolicyLossInputs, options: PolicyLossOptions) -> PolicyLoss:
    """DPPO as in `dppo_tv`, with the KL of the drawn token against all others as the measure."""
    valid = inside_binary_kl(
        inputs.logprob, inputs.old_logprob, inputs.advantages, options.clip_low, options.clip_high
    )
    return _inside_trust_region(inputs, options, valid)


def select_by_covariance(
    logprob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    fraction: float,
    bounds: tuple[float, float] | None,
    excluded: Tensor | None,
) -> Tensor:
    """The tokens whose log-probability and advantage vary together most.

    The method is that of https://arxiv.org/abs/2505.22617. A token's covariance is (A - mean A)
    (logp - mean logp), with the means over the mask. Upstream, Clip-Cov draws at random among the
    tokens within its bounds. Here the highest are taken, so that a run can be repeated.

    Args:
        logprob: under the policy that is trained, of the whole mini-batch.
        fraction: the part of the mask's tokens to choose, rounded down, but at least one token.
        bounds: choose only covariances strictly between these two; None: any.
        excluded: tokens not to choose, or None.

    Returns:
        As all tables [batch, response_len], bool. Of equal covariances the earliest are chosen.
    """
    logprob = logprob.detach().double()
    advantages = advantages.double()
    advantage_deviation = advantages - masked_mean(advantages, mask)
    logprob_deviation = logprob - masked_mean(logprob, mask)
    covariance = advantage_deviation * logprob_deviation

    candidates = mask if excluded is None else mask & ~excluded
    if bounds is not None:
        candidates = candidates & (covariance > bounds[0]) & (covariance < bounds[1])

    positions = candidates.flatten().nonzero().squeeze(1)
    order = covariance.flatten()[positions].sort(descending=True, stable=True).indices
    count = max(1, int(fraction * int(mask.sum())))

    selected = torch.zeros_like(mask).flatten()
    selected[positions[order[:count]]] = True
    return selected.view_as(mask)


def clip_cov_excluded(inputs: PolicyLossInputs, options: PolicyLossOptions) -> Tensor:
    """The tokens that PPO's clip takes, never chosen by Clip-Cov; bool [batch, response_len]."""
    _, clipped = _clipped_surrogate(inputs.advantages, inputs.log_ratio.exp(), options)
    return clipped & inputs.mask


POLICY_LOSSES: dict[PolicyLossName, PolicyLossFunction] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": reinforce,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "surrogate": surrogate,
    "reinforce": reinforce,
}


def _clean(numbers: Tensor, mask: Tensor) -> Tensor:
    """The numbers in their `working_dtype`, 0 outside the mask."""
    return torch.where(mask, numbers.to(working_dtype(numbers)), 0)


def _clipped_surrogate(
    advantages: Tensor, ratio: Tensor, options: PolicyLossOptions
) -> tuple[Tensor, Tensor]:
    """PPO's loss before any dual clip, and where its clipped term is the larger one."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _inside_trust_region(
    inputs: PolicyLossInputs, options: PolicyLossOptions, valid: Tensor
) -> PolicyLoss:
    ratio = inputs.log_ratio.exp().detach()
    loss = -inputs.advantages * ratio.clamp(max=options.clip_c) * inputs.logprob
    return make_policy_loss(
        inputs, torch.where(valid, loss, 0), ~valid, valid & (ratio > options.clip_c)
    )


def _selected(inputs: PolicyLossInputs, name: PolicyLossName) -> Tensor:
    if inputs.selected is None:
        raise ValueError(
            f"policy loss '{name}' needs `selected`: give it what select_by_covariance chose"
        )
    return inputs.selected
