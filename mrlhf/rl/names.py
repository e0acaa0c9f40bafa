"""Every name that a method can be chosen by, once, for the configuration and the mathematics alike.

A new method is a function, a name in this file and a line in the table beside the function. This
file imports no torch, so that the configuration can be read without it. It does not know what a
name computes.
"""

from __future__ import annotations

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
    "remax",
]
WHITENED: frozenset[str] = frozenset({"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""The estimators whose advantages are whitened over the batch."""
DISCOUNTED: tuple[AdvantageEstimator, ...] = ("gae", "reinforce_plus_plus")
"""The estimators that read gamma."""
COMPARES_ANSWERS: tuple[AdvantageEstimator, ...] = ("grpo", "grpo_passk")
"""The estimators that need at least two answers to a prompt, and may divide by their std."""

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
SEQUENCE_LEVEL: frozenset[str] = frozenset({"gspo", "sapo", "geo_mean"})
"""The losses that are aggregated as seq-mean-token-mean unless configured otherwise."""
COVARIANCE: frozenset[str] = frozenset({"clip_cov", "kl_cov"})
"""The losses that choose tokens by a statistic of the whole mini-batch."""
CLIPPED: tuple[LossMode, ...] = (
    "vanilla",
    "gspo",
    "cispo",
    "geo_mean",
    "clip_cov",
    "dppo_tv",
    "dppo_kl",
)
"""The losses that read the clip distances."""

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
    RewardKlKind,
    "k1+",
    "kl+",
    "abs+",
    "k2+",
    "mse+",
    "k3+",
    "low_var_kl+",
    "k1_clamped+",
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

RewardRule = Literal["exact_match", "gsm8k", "gsm8k_flexible", "format"]
RewardName = Literal[RewardRule, "reward_model"]
"""The terms of a reward that are not a user's function."""
CORRECTNESS_TERMS: tuple[RewardRule, ...] = ("exact_match", "gsm8k")
"""The rules that say which responses are right."""
