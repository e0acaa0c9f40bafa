"""From a scored rollout to what the updates need: shaped rewards, KL, rollout correction,
advantages, whitening.

Works on the global batch, which every rank holds, so that group statistics, whitening and metrics
need no communication and come out the same on every layout. It does not know the models whose
numbers it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.methods import find_method
from mrlhf.rl.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    estimate_advantages,
    length_adaptive_lam,
)
from mrlhf.rl.correction import Correction, Criterion, correct
from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.masking import local_moments, masked_mean, whiten
from mrlhf.rl.mismatch import mismatch_metrics, rejection_metrics, weight_metrics
from mrlhf.rl.names import WHITENED
from mrlhf.rl.shaping import token_rewards
from mrlhf.roles.actor import Evaluation
from mrlhf.rollout.collector import Collected


@dataclass(frozen=True)
class Opinions:
    """What the models say of a rollout; float32 [batch, response_len].

    Attributes:
        old: of the policy before the update; None in bypass mode, which takes the engine's word.
        ref_logprobs: of the reference, or None.
        values: of the critic, or None without one.
    """

    old: Evaluation | None
    ref_logprobs: Tensor | None
    values: Tensor | None


def make_experience(
    collected: Collected,
    shaped: Tensor,
    opinions: Opinions,
    algorithm: AlgorithmSection,
    kl_coef: float,
) -> tuple[Experience, float | None]:
    """Place rewards on tokens, correct for the engine's policy, estimate advantages.

    Advantages are estimated from whole responses; what correction rejects is left out of losses and
    of whitening, so that a rejected last token does not take its response's reward with it.

    Args:
        collected: the responses and their scores.
        shaped: [batch], scores after shaping, before any KL.
        opinions: of the models.
        algorithm: estimator, discount, KL, correction.
        kl_coef: coefficient of the KL in the reward now.

    Returns:
        The experience, and the KL in the reward: mean over sequences of the mean over their tokens,
        None if not in use.
    """
    rollout, scores = collected.rollout, collected.scores
    mask, old = rollout.response_mask, opinions.old
    old_logprobs = rollout.rollout_logprobs if old is None else old.logprobs
    kl = _reward_kl(old_logprobs, opinions, algorithm) if algorithm.use_kl_in_reward else None
    rewards = token_rewards(shaped, mask, kl, kl_coef, algorithm.kl_placement)
    if algorithm.whiten_rewards:
        rewards = whiten(rewards, mask, local_moments(rewards, mask), shift_mean=False)
    loss_mask, weights = mask, None
    correction = algorithm.rollout_correction
    if old is not None:
        corrected = correct(
            old.logprobs - rollout.rollout_logprobs, mask, make_correction(correction)
        )
        loss_mask, weights = corrected.kept, corrected.weights
    inputs = AdvantageInputs(
        rewards, mask, rollout.groups, opinions.values, collected.greedy_scores
    )
    estimator = find_method(
        "algorithm.adv_estimator", algorithm.adv_estimator, ADVANTAGE_ESTIMATORS
    )
    advantages, returns = estimate_advantages(estimator, inputs, _options(algorithm, mask))
    if algorithm.adv_estimator in WHITENED:
        advantages = whiten(advantages, loss_mask, local_moments(advantages, loss_mask))
    correct_answers = scores.correct
    experience = Experience(
        rollout=rollout,
        scores=scores.total,
        loss_mask=loss_mask,
        old_logprobs=old_logprobs,
        ref_logprobs=opinions.ref_logprobs,
        token_rewards=rewards,
        values=opinions.values,
        advantages=advantages,
        returns=returns,
        weights=weights,
        positive=None if correct_answers is None else torch.tensor(correct_answers) > 0.5,
    )
    return experience, None if kl is None else float(masked_mean(kl, mask, dim=1).mean())


def make_correction(section: RolloutCorrectionSection) -> Correction:
    """The configured correction as numbers."""
    lower, upper = section.bounds
    return Correction(
        level=section.rollout_is,
        lower=lower,
        upper=upper,
        normalise=section.rollout_is_batch_normalize,
        criteria=tuple(Criterion(*criterion) for criterion in section.criteria),
    )


def correction_metrics(
    logprobs: Tensor, rollout: Rollout, mask: Tensor, section: RolloutCorrectionSection
) -> dict[str, float]:
    """How far the engine's policy is from the trainer's, and what correction made of it.

    Args:
        logprobs: [batch, response_len], the trainer's.
        rollout: with the engine's.
        mask: bool [batch, response_len], the tokens that `logprobs` tells.
        section: the correction in use.

    Returns:
        `rollout_corr/*`; and `training/rollout_probs_diff_{mean,max,std}`, of the probabilities of
        the drawn tokens.
    """
    log_ratio, correction = logprobs - rollout.rollout_logprobs, make_correction(section)
    found = mismatch_metrics(logprobs, rollout.rollout_logprobs, mask)
    corrected = correct(log_ratio, mask, correction)
    if correction.level is not None:
        found |= weight_metrics(corrected, correction, log_ratio, mask)
    if correction.criteria:
        found |= rejection_metrics(corrected, mask)
    gap = (logprobs.double().exp() - rollout.rollout_logprobs.double().exp()).abs()
    moments = local_moments(gap, mask)
    metrics = {f"rollout_corr/{name}": value for name, value in found.items()}
    if moments.count:
        metrics |= {
            "training/rollout_probs_diff_mean": moments.mean,
            "training/rollout_probs_diff_max": float(gap[mask].max()),
            "training/rollout_probs_diff_std": moments.variance**0.5,
        }
    return metrics


def _options(algorithm: AlgorithmSection, mask: Tensor) -> AdvantageOptions:
    lam: float | Tensor = algorithm.lam
    if algorithm.lam_length_alpha is not None:
        lam = length_adaptive_lam(mask, algorithm.lam_length_alpha)
    return AdvantageOptions(
        gamma=algorithm.gamma,
        lam=lam,
        critic_lam=algorithm.lam_critic,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        f_norm=algorithm.f_norm,
    )


def _reward_kl(old_logprobs: Tensor, opinions: Opinions, algorithm: AlgorithmSection) -> Tensor:
    if algorithm.kl_penalty == "full":
        assert opinions.old is not None and opinions.old.full_kl is not None
        return opinions.old.full_kl
    assert opinions.ref_logprobs is not None
    return kl_penalty(old_logprobs, opinions.ref_logprobs, algorithm.kl_penalty)
