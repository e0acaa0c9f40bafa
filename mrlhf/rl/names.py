"""The names of all methods. Both the configuration and the mathematics use them.

Beside the names of estimators and losses stand their traits: what the rest of the program must
know of a method without calling it. A built-in method is a function, a line in the table beside the
function, and here a name and its traits. This file imports no torch, so that the configuration can
be read without it. It does not know what a name computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AdvantageEstimator = Literal[
    "gae",
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "flash_reinforce",
    "remax",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "online_dpo",
]


@dataclass(frozen=True)
class EstimatorTraits:
    """Facts about an advantage estimator for those who do not call it."""

    whitened: bool = False  # whether its advantages are whitened over the batch
    needs_values: bool = False  # whether it needs a critic
    # whether it needs the score of a greedy answer to each prompt
    needs_greedy_answer: bool = False
    compares_answers: bool = False  # whether it needs at least two answers to a prompt
    # whether a token's advantage depends on the rewards from it on, so that the tokens of one
    # response may have different advantages
    sums_later_rewards: bool = False
    # whether each token has a baseline of its own, for which the pass before the update sums the
    # squared probabilities of the vocabulary
    needs_squared_probabilities: bool = False
    # whether a response is compared with the others to its prompt, if there are any, so that equal
    # scores teach nothing
    compares_within_prompt: bool = False
    # whether it is computed from the scores of single terms of the reward, and not from their sum,
    # so that what shapes the sum has no effect
    compares_terms: bool = False
    # whether it prefers one response to a prompt to another, compared with a reference
    pairs: bool = False


ESTIMATOR_TRAITS: Mapping[str, EstimatorTraits] = {
    "gae": EstimatorTraits(whitened=True, needs_values=True),
    "grpo": EstimatorTraits(compares_answers=True, compares_within_prompt=True),
    "grpo_passk": EstimatorTraits(compares_answers=True, compares_within_prompt=True),
    "rloo": EstimatorTraits(compares_within_prompt=True),
    "opo": EstimatorTraits(compares_within_prompt=True),
    "gpg": EstimatorTraits(compares_within_prompt=True),
    "reinforce_plus_plus": EstimatorTraits(whitened=True, sums_later_rewards=True),
    "reinforce_plus_plus_baseline": EstimatorTraits(whitened=True, compares_within_prompt=True),
    "flash_reinforce": EstimatorTraits(),
    "remax": EstimatorTraits(needs_greedy_answer=True, sums_later_rewards=True),
    "gdpo": EstimatorTraits(
        whitened=True, compares_answers=True, compares_within_prompt=True, compares_terms=True
    ),
    "optimal_token_baseline": EstimatorTraits(
        sums_later_rewards=True, needs_squared_probabilities=True, compares_within_prompt=True
    ),
    "tir_optimal_token_baseline": EstimatorTraits(
        sums_later_rewards=True, needs_squared_probabilities=True, compares_within_prompt=True
    ),
    "online_dpo": EstimatorTraits(compares_answers=True, compares_within_prompt=True, pairs=True),
}
OWN_ESTIMATOR = EstimatorTraits()
"""The traits of a user's estimator: nothing is asked of the run."""


def estimator_traits(name: str) -> EstimatorTraits:
    """The traits of the estimator `name`, which is built in or a user's function."""
    return ESTIMATOR_TRAITS.get(name, OWN_ESTIMATOR)


RouterReplay = Literal["none", "rollout", "old"]
LossMode = Literal[
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "gpg",
    "geo_mean",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "surrogate",
]
PolicyLossName = Literal[LossMode, "reinforce"]
"""All policy losses; `reinforce` is chosen by the loss type of the rollout correction alone."""


@dataclass(frozen=True)
class PolicyLossTraits:
    """Facts about a policy loss for those who do not call it."""

    # whether it is aggregated as seq-mean-token-mean unless configured otherwise
    sequence_level: bool = False
    # whether it needs tokens that are chosen by a statistic of the whole mini-batch
    selects_tokens: bool = False
    # whether the loss of a token depends on other tokens of its sequence
    needs_sequences: bool = False


POLICY_LOSS_TRAITS: Mapping[str, PolicyLossTraits] = {
    "vanilla": PolicyLossTraits(),
    "gspo": PolicyLossTraits(sequence_level=True, needs_sequences=True),
    "cispo": PolicyLossTraits(),
    "sapo": PolicyLossTraits(sequence_level=True),
    "gpg": PolicyLossTraits(),
    "geo_mean": PolicyLossTraits(sequence_level=True, needs_sequences=True),
    "clip_cov": PolicyLossTraits(selects_tokens=True),
    "kl_cov": PolicyLossTraits(selects_tokens=True),
    "dppo_tv": PolicyLossTraits(),
    "dppo_kl": PolicyLossTraits(),
    "surrogate": PolicyLossTraits(),
    "reinforce": PolicyLossTraits(),
}
OWN_POLICY_LOSS = PolicyLossTraits(needs_sequences=True)
"""The traits of a user's loss. It is given whole sequences, since it may use them."""


def policy_loss_traits(name: str) -> PolicyLossTraits:
    """The traits of the policy loss `name`, which is built in or a user's function."""
    return POLICY_LOSS_TRAITS.get(name, OWN_POLICY_LOSS)


LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]

RewardKlKind = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1_clamped", "full"]
"""Estimators of the KL in the reward."""
KlKind = Literal[
    RewardKlKind, "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+", "k1_clamped+"
]
"""Estimators of the KL in the loss: a `+` stands for the gradient of k2."""
KlPlacement = Literal["token", "terminal"]
KlControllerKind = Literal["fixed", "adaptive"]

RewardNorm = Literal["running", "group", "batch"]
FilterMetric = Literal["acc", "score", "seq_reward"]

WeightLevel = Literal["token", "sequence"]
Statistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
BypassLoss = Literal["ppo_clip", "reinforce"]

PairLossName = Literal["sigmoid", "ipo"]
"""Losses on pairs of responses."""

RowKind = Literal["pairs", "rankings", "targets"]
"""What a reward model learns from: two responses, several in order, or one with a number."""

Combine = Literal["mean", "min", "mean_minus_std", "mean_minus_variance"]
"""How the scores of several reward models become one."""

RewardRule = Literal["exact_match", "gsm8k", "gsm8k_flexible", "format"]
RewardName = Literal[RewardRule, "reward_model", "environment", "judge"]
"""The terms of a reward that are not a user's function."""
CORRECTNESS_TERMS: tuple[RewardRule, ...] = ("exact_match", "gsm8k")
"""The rules that say which responses are right."""
