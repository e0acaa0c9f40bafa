"""Computes advantages and returns from rewards, with the estimator chosen by name.

The advantages are not yet whitened. Whitening (for the estimators whose traits say `whitened`)
needs the moments of the whole batch and is the caller's second step. This file does not know how
the rewards were made. The estimators that need no critic are in `group_advantages` and
`token_baselines`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.errors import ConfigError
from mrlhf.rl.group_advantages import (
    AdvantagesAndReturns,
    flash_reinforce,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from mrlhf.rl.masking import working_dtype
from mrlhf.rl.names import AdvantageEstimator
from mrlhf.rl.preference import PairLogprobs, dpo_loss, online_dpo
from mrlhf.rl.token_baselines import (
    TokenProbabilities,
    optimal_token_baseline,
    tir_optimal_token_baseline,
)


@dataclass(frozen=True)
class AdvantageInputs:
    """The batch as estimators see it: whole prompt groups, and for `gpg` the whole batch.

    A row is a unit with a reward of its own: a response, or one context of an episode.
    """

    rewards: Tensor  # [units, response_len], the reward of each token
    mask: Tensor  # bool [units, response_len]
    prompt_groups: Tensor  # int64 [units], rows with the same number are compared
    # [units, response_len], the critic's prediction before each token, which `gae` needs; None
    # without a critic
    values: Tensor | None = None
    # [units], the score of the greedy response to each row's prompt, for `remax`
    greedy_scores: Tensor | None = None
    # of each token under the policy before the update, for `optimal_token_baseline` and
    # `tir_optimal_token_baseline`
    probabilities: TokenProbabilities | None = None
    # [terms, units], the scores of single terms of the reward, for `gdpo`. A user's estimator gets
    # those that `algorithm.gdpo_reward_keys` names. Else None.
    components: Tensor | None = None
    # [units, response_len] each, log-probabilities under the policy that drew the responses and
    # under the reference, for `online_dpo`
    logprobs: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        assert self.rewards.shape == self.mask.shape, (
            f"{tuple(self.rewards.shape)}, {tuple(self.mask.shape)}"
        )
        assert self.prompt_groups.shape == self.rewards.shape[:1], (
            f"{tuple(self.prompt_groups.shape)}, {tuple(self.rewards.shape)}"
        )
        assert self.components is None or self.components.shape[1:] == self.prompt_groups.shape, (
            f"{tuple(self.components.shape)} components, {tuple(self.prompt_groups.shape)} rows"
        )


@dataclass(frozen=True)
class AdvantageOptions:
    """The numbers that estimators take, and who reads each."""

    gamma: float = 1.0  # discount of `gae` and `reinforce_plus_plus`
    lam: float | Tensor = 1.0  # lambda of `gae`, one for all responses or [units]
    # lambda of the returns that the critic learns in `gae`; None: the same as `lam`
    critic_lam: float | None = None
    # whether `grpo`, `grpo_passk` and `gdpo` divide by the std of the prompt group
    norm_by_std: bool = True
    f_norm: float = 1.0  # divisor of `gpg`
    # the weight of each component in `gdpo`; None: 1 for all
    component_weights: tuple[float, ...] | None = None
    pair_loss: Callable[[PairLogprobs], Tensor] = dpo_loss  # of `online_dpo`


Estimator = Callable[[AdvantageInputs, AdvantageOptions], AdvantagesAndReturns]
TokenBaseline = Callable[[Tensor, Tensor, Tensor, TokenProbabilities], AdvantagesAndReturns]


def estimate_advantages(
    estimator: Estimator, inputs: AdvantageInputs, options: AdvantageOptions
) -> AdvantagesAndReturns:
    """Advantages, not yet whitened, and returns by `estimator`.

    Returns:
        Both [units, response_len], 0 outside the mask.

    Raises:
        ValueError: `gae` without values, `remax` without greedy scores, `gdpo` without components,
            a token baseline without probabilities.
        ConfigError: a user's function did not return two tensors of the shape of the rewards.
    """
    result = estimator(inputs, options)
    shape = inputs.rewards.shape
    if not isinstance(result, tuple) or [x.shape for x in result] != [shape, shape]:
        raise ConfigError(
            "the advantage estimator must return (advantages, returns), two tensors of the shape "
            f"of the rewards, {tuple(shape)}"
        )

    advantages, returns = result
    outside = ~inputs.mask
    return advantages.masked_fill(outside, 0), returns.masked_fill(outside, 0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> AdvantagesAndReturns:
    """Generalised advantage estimation, https://arxiv.org/abs/1506.02438.

    A masked-out position is skipped: the value and the advantage after it are handed unchanged to
    the position before it. After the last position both are 0, because a response ends the episode,
    whether it stopped by itself or was cut.

    Args:
        rewards: [units, response_len], the reward of each token.
        values: [units, response_len], the critic's prediction before each token.
        mask: bool [units, response_len].
        gamma: discount.
        lam: 0 trusts the critic after one token, 1 trusts the rewards alone; one for all or
            [units].

    Returns:
        Advantages and returns (advantage + value), both [units, response_len], 0 outside the mask,
        in the wider `working_dtype` of rewards and values.
    """
    assert rewards.shape == values.shape == mask.shape, (
        f"{rewards.shape}, {values.shape}, {mask.shape}"
    )
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"
    dtype = torch.promote_types(working_dtype(rewards), working_dtype(values))
    rewards = rewards.to(dtype)
    values = values.to(dtype)
    if isinstance(lam, Tensor):
        assert lam.shape == values.shape[:1], (
            f"lam {tuple(lam.shape)} against values {tuple(values.shape)}"
        )
        lam = lam.to(dtype)

    next_value = values.new_zeros(len(values))
    last = torch.zeros_like(next_value)
    # The numbers of one position side by side, as each round needs them.
    columns = zip(*(table.t().contiguous() for table in (rewards, values, mask)), strict=True)
    by_position = values.new_zeros(values.shape[::-1])
    for position, (reward, value, valid) in reversed(list(enumerate(columns))):
        delta = reward + gamma * next_value - value
        last = torch.where(valid, delta + gamma * lam * last, last)
        next_value = torch.where(valid, value, next_value)
        by_position[position] = torch.where(valid, last, 0)

    advantages = by_position.t().contiguous()
    returns = torch.where(mask, advantages + values, 0)
    return advantages, returns


def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """Lambda of each response, 1 - 1 / (alpha * length), so that long ones bootstrap late.

    The formula is that of VAPO, https://arxiv.org/abs/2504.05118; float64 [units], in [0, 1].
    """
    # `gae` steps from one token of the mask [units, response_len] to the next.
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"
    assert alpha > 0, f"alpha {alpha} must be above 0"
    return (1 - 1 / (alpha * mask.sum(dim=1).double())).clamp(0, 1)


def _decoupled_gae(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantagesAndReturns:
    """GAE whose returns may have a lambda of their own, VAPO, https://arxiv.org/abs/2504.05118."""
    if inputs.values is None:
        raise ValueError(
            "gae needs values: give the run a critic, or set algorithm.adv_estimator to one without"
        )
    rewards = inputs.rewards
    mask = inputs.mask
    advantages, returns = gae(rewards, inputs.values, mask, options.gamma, options.lam)
    if options.critic_lam is not None:
        _, returns = gae(rewards, inputs.values, mask, options.gamma, options.critic_lam)
    return advantages, returns


def _remax(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantagesAndReturns:
    if inputs.greedy_scores is None:
        raise ValueError(
            "remax needs greedy_scores: generate and score one greedy response a prompt"
        )
    return remax(inputs.rewards, inputs.mask, inputs.greedy_scores)


def _gdpo(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantagesAndReturns:
    components = inputs.components
    if components is None:
        raise ValueError("gdpo needs components: give it the score of each term of the reward")
    weights = options.component_weights or (1.0,) * len(components)
    return gdpo(
        components, weights, inputs.rewards, inputs.mask, inputs.prompt_groups, options.norm_by_std
    )


def _online_dpo(x: AdvantageInputs, options: AdvantageOptions) -> AdvantagesAndReturns:
    if x.logprobs is None:
        raise ValueError("online_dpo needs logprobs: those of the policy and of a reference")
    return online_dpo(x.rewards, x.mask, x.prompt_groups, x.logprobs, options.pair_loss)


def _token_baseline(function: TokenBaseline) -> Estimator:
    """Make an estimator of one of the functions of `token_baselines`."""

    def estimate(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantagesAndReturns:
        if inputs.probabilities is None:
            raise ValueError(
                f"{function.__name__} needs probabilities: those of the policy before the update, "
                "with the sum of their squares over the vocabulary"
            )
        return function(inputs.rewards, inputs.mask, inputs.prompt_groups, inputs.probabilities)

    return estimate


ADVANTAGE_ESTIMATORS: dict[AdvantageEstimator, Estimator] = {
    "gae": _decoupled_gae,
    "grpo": lambda x, options: grpo(x.rewards, x.mask, x.prompt_groups, options.norm_by_std),
    "grpo_passk": lambda x, options: grpo_passk(
        x.rewards, x.mask, x.prompt_groups, options.norm_by_std
    ),
    "rloo": lambda x, options: rloo(x.rewards, x.mask, x.prompt_groups),
    "opo": lambda x, options: opo(x.rewards, x.mask, x.prompt_groups),
    "gpg": lambda x, options: gpg(x.rewards, x.mask, x.prompt_groups, options.f_norm),
    "reinforce_plus_plus": lambda x, options: reinforce_plus_plus(x.rewards, x.mask, options.gamma),
    "reinforce_plus_plus_baseline": lambda x, options: reinforce_plus_plus_baseline(
        x.rewards, x.mask, x.prompt_groups
    ),
    "flash_reinforce": lambda x, options: flash_reinforce(x.rewards, x.mask),
    "remax": _remax,
    "gdpo": _gdpo,
    "optimal_token_baseline": _token_baseline(optimal_token_baseline),
    "tir_optimal_token_baseline": _token_baseline(tir_optimal_token_baseline),
    "online_dpo": _online_dpo,
}
