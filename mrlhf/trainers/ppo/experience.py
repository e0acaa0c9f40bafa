"""Turns a scored rollout into the input of the updates: rewards, rollout correction, advantages.

It works on the global batch, which every rank sees. So statistics of prompt groups, whitening and
metrics need no communication and are the same on every layout. It does not know the models whose
outputs it gets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.methods import find_method
from mrlhf.rl.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    estimate_advantages,
    length_adaptive_lam,
)
from mrlhf.rl.correction import correct
from mrlhf.rl.group_advantages import AdvantagesAndReturns
from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.masking import local_moments, masked_mean, whiten
from mrlhf.rl.names import estimator_traits
from mrlhf.rl.preference import PAIR_LOSSES, PairLossOptions
from mrlhf.rl.prompt_groups import PromptGroups
from mrlhf.rl.shaping import token_rewards
from mrlhf.rl.token_baselines import TokenProbabilities
from mrlhf.roles.actor import Evaluation
from mrlhf.roles.policy_loss import make_correction
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.components import RewardComponents
from mrlhf.rollout.reward_units import RewardUnits
from mrlhf.rollout.score_checks import check_advantages


@dataclass(frozen=True)
class ModelOutputs:
    """The models' outputs for a rollout; float32 [batch, response_len]."""

    # Outputs of the policy before the update; None in bypass mode, which uses the engine's
    # log-probabilities instead, and where the update's own pass gives them.
    policy: Evaluation | None
    ref_logprobs: Tensor | None  # log-probabilities under the reference, or None without one
    values: Tensor | None  # the critic's predictions, or None without a critic
    # log-probabilities under the teacher; None where none is part of the reward
    teacher_logprobs: Tensor | None = None

    def tables(self) -> list[Tensor]:
        """The tensors that an experience refers to; it needs no copies of them."""
        logprobs = None if self.policy is None else self.policy.logprobs
        every = (logprobs, self.ref_logprobs, self.values, self.teacher_logprobs)
        return [table for table in every if table is not None]


def make_experience(
    collected: Collected,
    shaped: Tensor,
    outputs: ModelOutputs,
    algorithm: AlgorithmSection,
    kl_coef: float,
    components: RewardComponents | None = None,
) -> tuple[Experience, float | None]:
    """Place rewards on tokens, correct for the engine's policy, estimate advantages.

    Only tokens that train (the rollout's `loss_mask`) get rewards and advantages: the score is
    placed on the last of them, and where contexts have rewards of their own, on the last of each.
    Advantages are estimated before rejection, so that a rejected last token does not take its
    response's reward with it; losses and whitening leave rejected tokens out.

    Args:
        shaped: [batch], scores after shaping, before any KL.
        kl_coef: the current coefficient of the KL in the reward.
        components: the scores of single terms, for an estimator that compares them.

    Returns:
        The experience, and the KL in the reward: the mean over sequences of the mean over their
            tokens, or None if it is not in use.

    Raises:
        RewardError: the scores are so large that an advantage is not finite.
    """
    rollout = collected.rollout
    drawn = rollout.loss_mask
    policy = outputs.policy
    old_logprobs = None if policy is None else policy.logprobs
    if algorithm.rollout_correction.bypass_mode:
        old_logprobs = rollout.rollout_logprobs

    kl = _reward_kl(old_logprobs, outputs, algorithm) if algorithm.use_kl_in_reward else None
    units = RewardUnits.of(rollout)
    praise = None
    if outputs.teacher_logprobs is not None:
        # A sample of -KL(policy, teacher) at each token, as in https://arxiv.org/abs/2306.13649.
        assert old_logprobs is not None
        praise = outputs.teacher_logprobs - old_logprobs
    rewards = _rewards(shaped, rollout, units, kl, kl_coef, algorithm, praise)
    loss_mask, weights = _corrected(policy, rollout, algorithm.rollout_correction)

    inputs = _advantage_inputs(collected, units, outputs, rewards, weights, components)
    options = _advantage_options(algorithm, inputs.mask, components)
    estimated = _advantages(inputs, options, algorithm.adv_estimator)
    rewards = units.fold(rewards, len(rollout))
    advantages = units.fold(estimated[0], len(rollout))
    returns = units.fold(estimated[1], len(rollout))
    if estimator_traits(algorithm.adv_estimator).whitened:
        advantages = whiten(advantages, loss_mask, local_moments(advantages, loss_mask))
    numbers = [rewards] if outputs.values is None else [rewards, outputs.values]
    if all(bool(tensor.isfinite().all()) for tensor in numbers):
        check_advantages(advantages, returns, shaped, rollout, algorithm.adv_estimator)

    right = collected.scores.correct
    experience = Experience(
        rollout=rollout,
        scores=rollout.with_turn_rewards(collected.scores.total),
        loss_mask=loss_mask,
        old_logprobs=old_logprobs,
        ref_logprobs=outputs.ref_logprobs,
        token_rewards=rewards,
        values=outputs.values,
        advantages=advantages,
        returns=returns,
        weights=weights,
        positive=None if right is None else torch.tensor(right) > 0.5,
    )
    mean_kl = None
    if kl is not None:
        mean_kl = float(masked_mean(kl, drawn, dim=1)[~rollout.given].mean())
    return experience, mean_kl


def equal_score_metrics(scores: Tensor, prompt_groups: Tensor, estimator: str) -> dict[str, float]:
    """Measure how often scores are equal to the scores that they are compared with.

    Args:
        scores: [units], after shaping and with the rewards of turns, or [terms, units].
        prompt_groups: int64 [units], those with the same number are compared.

    Returns:
        `training/equal_scores`: 1 if all scores are equal, otherwise 0.
        `training/equal_groups`: the share of the prompts whose responses have equal scores.
        Both are missing where nothing is compared.
    """
    columns = scores if scores.dim() == 2 else scores[None]
    if len(prompt_groups) < 2:
        return {}

    all_equal = all(bool((column == column[0]).all()) for column in columns)
    metrics = {"training/equal_scores": float(all_equal)}

    by_prompt = PromptGroups(prompt_groups)
    compares = estimator_traits(estimator).compares_within_prompt
    if compares and not bool(by_prompt.single.any()):
        equal = by_prompt.size > 0
        for column in columns:
            equal &= by_prompt.highest(column) == by_prompt.lowest(column)
        # Each prompt counts once, whatever the number of its responses.
        weights = 1 / by_prompt.size.double()
        metrics["training/equal_groups"] = float(weights[equal].sum() / weights.sum())
    return metrics


def _rewards(
    shaped: Tensor,
    rollout: Rollout,
    units: RewardUnits,
    kl: Tensor | None,
    kl_coef: float,
    algorithm: AlgorithmSection,
    praise: Tensor | None,
) -> Tensor:
    """The reward of each token, [units, response_len]; those of turns are not shaped.

    `praise` [batch, response_len] is what a teacher adds, before its factor.
    """
    drawn = units.mask
    kl = None if kl is None else units.spread(kl)
    rewards = token_rewards(units.spread(shaped), drawn, kl, kl_coef, algorithm.kl_placement)
    if praise is not None:
        rewards = rewards + algorithm.distillation.coef * units.spread(praise) * drawn
    turn_rewards = rollout.turn_rewards()
    if turn_rewards is not None:
        rewards = rewards + units.spread(turn_rewards) * drawn
    if algorithm.whiten_rewards:
        rewards = whiten(rewards, drawn, local_moments(rewards, drawn), shift_mean=False)
    return rewards


def _corrected(
    policy: Evaluation | None, rollout: Rollout, section: RolloutCorrectionSection
) -> tuple[Tensor, Tensor | None]:
    """The tokens that correction keeps, and their weights, if it gives any."""
    drawn = rollout.loss_mask
    if policy is None:  # bypass mode corrects each mini-batch of the update, else nothing does
        return drawn, None

    log_ratio = policy.logprobs - rollout.rollout_logprobs
    corrected = correct(log_ratio, drawn, make_correction(section))
    return corrected.kept, corrected.weights


def _advantage_inputs(
    collected: Collected,
    units: RewardUnits,
    outputs: ModelOutputs,
    rewards: Tensor,
    weights: Tensor | None,
    components: RewardComponents | None,
) -> AdvantageInputs:
    def spread(table: Tensor | None) -> Tensor | None:
        return None if table is None else units.spread(table)

    policy = outputs.policy
    both = None
    if policy is not None and outputs.ref_logprobs is not None:
        both = (units.spread(policy.logprobs), units.spread(outputs.ref_logprobs))
    probabilities = None
    if policy is not None and policy.sum_of_squares is not None:
        logprobs, squares = map(units.spread, (policy.logprobs, policy.sum_of_squares))
        probabilities = TokenProbabilities(logprobs, squares, spread(weights))
    return AdvantageInputs(
        rewards=rewards,
        mask=units.mask,
        prompt_groups=units.groups,
        values=spread(outputs.values),
        greedy_scores=spread(collected.greedy_scores),
        probabilities=probabilities,
        components=None if components is None else components.scores,
        logprobs=both,
    )


def _advantages(
    inputs: AdvantageInputs, options: AdvantageOptions, name: str
) -> AdvantagesAndReturns:
    """Advantages, not yet whitened, and returns of all drawn tokens."""
    estimator = find_method("algorithm.adv_estimator", name, ADVANTAGE_ESTIMATORS)
    if name in ADVANTAGE_ESTIMATORS:
        return estimate_advantages(estimator, inputs, options)

    # A user's runs once a machine, so the other ranks would not see what it writes to its inputs.
    tables: dict[str, Any] = {
        name: x.clone() for name, x in vars(inputs).items() if isinstance(x, Tensor)
    }
    copies = replace(inputs, **tables)
    return estimate_advantages(lambda _, options: estimator(copies, options), inputs, options)


def _advantage_options(
    algorithm: AlgorithmSection, mask: Tensor, components: RewardComponents | None
) -> AdvantageOptions:
    lam: float | Tensor = algorithm.lam
    if algorithm.lam_length_alpha is not None:
        lam = length_adaptive_lam(mask, algorithm.lam_length_alpha)

    return AdvantageOptions(
        gamma=algorithm.gamma,
        lam=lam,
        critic_lam=algorithm.lam_critic,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        f_norm=algorithm.f_norm,
        component_weights=None if components is None else components.weights,
        pair_loss=lambda pairs: PAIR_LOSSES[algorithm.pair_loss](
            pairs, PairLossOptions(algorithm.pair_beta, label_smoothing=0.0)
        ),
    )


def _reward_kl(
    old_logprobs: Tensor | None, outputs: ModelOutputs, algorithm: AlgorithmSection
) -> Tensor:
    """KL to the reference at each token, [batch, response_len]."""
    if algorithm.kl_penalty == "full":
        assert outputs.policy is not None and outputs.policy.full_kl is not None
        return outputs.policy.full_kl

    assert old_logprobs is not None and outputs.ref_logprobs is not None
    return kl_penalty(old_logprobs, outputs.ref_logprobs, algorithm.kl_penalty)
