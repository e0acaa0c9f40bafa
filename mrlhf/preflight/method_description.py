"""The method of a PPO configuration in words: rewards, advantages, loss and correction.

It does not judge the method: `method_checks` does.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.roots import PPOConfig
from mrlhf.config.unread import trained_loss
from mrlhf.rl.names import estimator_traits, policy_loss_traits
from mrlhf.roles.policy_loss import (
    configured_bypass,
    needs_mini_batch_pass,
)
from mrlhf.user_code import is_reference


def describe_method(config: PPOConfig) -> Iterator[str]:
    """The method, one line for each part of it that is in use."""
    actor = config.actor
    yield "the method"
    if not config.needs_critic:
        yield f"  no critic: {_why_no_critic(config.algorithm.adv_estimator)}"
    yield f"  rewards: {', '.join(_rewards(config))}"
    yield f"  advantages: {_estimator(config)}"

    yield f"  policy loss: {_loss(config)}"
    if actor.use_kl_loss:
        yield (
            f"  KL in the loss: + {actor.kl_loss_coef:g} x KL {actor.kl_loss_type} to the reference"
        )
    yield f"  aggregation: {actor.agg_mode}"
    yield f"  rollout correction: {_correction(config.algorithm.rollout_correction)}"

    if actor.target_kl_stop is not None:
        yield (
            "  an update stops before the step whose actor/ppo_kl is above "
            f"{actor.target_kl_stop:g}"
        )
    for name, role in config.trained().items():
        norm = role.optim.skip_grad_norm
        if norm is not None:
            yield f"  {name}: steps with a gradient norm above {norm:g} are skipped"

    correction = config.algorithm.rollout_correction
    loss, _ = trained_loss(config)
    if needs_mini_batch_pass(loss, configured_bypass(correction)):
        yield (
            "  one more forward pass a mini-batch: a statistic of the current policy over all of "
            "it comes first"
        )


def _why_no_critic(estimator: str) -> str:
    return "algorithm.use_critic is false" if is_reference(estimator) else f"{estimator} needs none"


def _rewards(config: PPOConfig) -> Iterator[str]:
    """What is done to the scores, in this order."""
    algorithm = config.algorithm
    if algorithm.reward_norm is None:
        yield "scores"
    else:
        yield f"scores normalised ({algorithm.reward_norm})"
    if algorithm.reward_clip is not None:
        yield f"clipped to -/+ {algorithm.reward_clip:g}"

    buffer = algorithm.overlong_buffer
    if buffer.enable:
        yield (
            f"up to -{buffer.penalty_factor:g} in the last {buffer.len} of "
            f"{config.data.max_response_length} tokens"
        )
    if algorithm.missing_eos_penalty:
        yield f"-{algorithm.missing_eos_penalty:g} where cut off"

    if algorithm.use_kl_in_reward:
        yield f"minus {_kl_in_reward(config)}"
    if algorithm.whiten_rewards:
        yield "whitened"


def _kl_in_reward(config: PPOConfig) -> str:
    """The coefficient, the estimator and the place of the KL in the reward."""
    algorithm = config.algorithm
    control = algorithm.kl_ctrl
    coefficient = f"{control.kl_coef:g}"
    if control.type == "adaptive":
        coefficient += f" (adaptive, target {control.target_kl:g}, horizon {control.horizon})"

    place = "of each token"
    if algorithm.kl_placement == "terminal":
        place = "of the response off its last token"
    return f"{coefficient} x KL {algorithm.kl_penalty} {place}"


def _estimator(config: PPOConfig) -> str:
    """The advantage estimator, with the numbers that it reads."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    if is_reference(name):
        return f"{name}, your own, not whitened"

    traits = estimator_traits(name)
    words = name
    if "gamma" in traits.reads:
        words += f", gamma {algorithm.gamma}"
    if "lam" in traits.reads:
        words += f", {_lambdas(config)}"
    if "f_norm" in traits.reads:
        words += f", divided by {algorithm.f_norm}"
    if "norm_adv_by_std_in_grpo" in traits.reads and not algorithm.norm_adv_by_std_in_grpo:
        words += ", not divided by the standard deviation"
    if traits.compares_terms:
        words += f", of {_compared_terms(config)}"
    if traits.needs_squared_probabilities:
        words += ", with a baseline for each token"
    if traits.needs_greedy_answer:
        words += ", against a greedy answer to each prompt"
    return words


def _compared_terms(config: PPOConfig) -> str:
    """The scores that are compared one by one, with their weights."""
    names = config.algorithm.gdpo_reward_keys
    if names is None:
        return "reward.terms one by one"
    weights = config.algorithm.gdpo_reward_weights or [1.0] * len(names)
    pairs = zip(weights, names, strict=True)
    return " + ".join(name if weight == 1 else f"{weight:g} x {name}" for weight, name in pairs)


def _lambdas(config: PPOConfig) -> str:
    """The lambda of the advantages, and that of the critic's targets if it is another."""
    algorithm = config.algorithm
    words = f"lambda {algorithm.lam}"
    if algorithm.lam_length_alpha is not None:
        words = f"lambda 1 - 1 / ({algorithm.lam_length_alpha} x length)"
    if algorithm.lam_critic is not None:
        words += f", of the critic's targets {algorithm.lam_critic}"
    return words


def _loss(config: PPOConfig) -> str:
    """The policy loss and what is added to it."""
    actor = config.actor
    loss, _ = trained_loss(config)
    words = loss
    clip = f"clip -{actor.clip_low:g} +{actor.clip_high:g}"
    if is_reference(loss):
        words += f", your own, given {clip}"
    elif policy_loss_traits(loss).clips:
        dual_clip = f", dual clip {actor.clip_ratio_c:g}" if loss == "vanilla" else ""
        words += f", {clip}{dual_clip}"

    if actor.entropy_coeff:
        words += f", - {actor.entropy_coeff:g} x entropy"
    if actor.positive_lm_coef:
        words += f", + {actor.positive_lm_coef:g} x negative log-likelihood of right responses"
    return words


def _correction(correction: RolloutCorrectionSection) -> str:
    """The mode of the correction, its weights, and what it keeps."""
    if not correction.active:
        return "none, the mismatch is only measured"
    parts = ["bypass, old = the engine's log-probs" if correction.bypass_mode else "decoupled"]

    if correction.rollout_is is not None:
        lower, upper = correction.bounds
        bounds = f"cut off at {upper:g}" if lower is None else f"0 outside {lower:g}..{upper:g}"
        mean = ", divided by their mean" if correction.rollout_is_batch_normalize else ""
        parts.append(f"{correction.rollout_is} weights {bounds}{mean}")

    for statistic, lower, upper in correction.criteria:
        bounds = f"<= {upper:g}" if lower is None else f"in {lower:g}..{upper:g}"
        parts.append(f"kept where {statistic} {bounds}")
    return ", ".join(parts)
