"""The method of a PPO configuration in words: what is estimated, what is minimised, what is
corrected.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.roots import PPOConfig
from mrlhf.rl.names import CLIPPED
from mrlhf.roles.policy_loss import (
    configured_bypass,
    configured_loss,
    needs_mini_batch_pass,
)
from mrlhf.user_code import is_reference


def describe_method(config: PPOConfig) -> Iterator[str]:
    """A line each: critic, rewards, advantages, policy loss, KL, aggregation, correction, limits, a
    further pass.
    """
    yield "the method"
    if not config.needs_critic:
        estimator = config.algorithm.adv_estimator
        why = (
            "algorithm.use_critic is false"
            if is_reference(estimator)
            else f"{estimator} needs none"
        )
        yield f"  no critic: {why}"
    yield f"  rewards: {', '.join(_rewards(config))}"
    yield f"  advantages: {_estimator(config)}"
    yield f"  policy loss: {_loss(config)}"
    if config.actor.use_kl_loss:
        yield f"  KL in the loss: + {config.actor.kl_loss_coef:g} x KL {config.actor.kl_loss_type} to the reference"
    yield f"  aggregation: {config.actor.agg_mode}"
    yield f"  rollout correction: {_correction(config.algorithm.rollout_correction)}"
    if config.actor.target_kl_stop is not None:
        yield f"  an update stops before the step whose actor/ppo_kl is above {config.actor.target_kl_stop:g}"
    for name, role in config.trained().items():
        if role.optim.skip_grad_norm is not None:
            yield f"  {name}: steps with a gradient norm above {role.optim.skip_grad_norm:g} are skipped"
    correction = config.algorithm.rollout_correction
    loss = configured_loss(config.actor, correction)
    if needs_mini_batch_pass(loss, configured_bypass(correction)):
        yield "  one more forward pass a mini-batch: a statistic of the current policy over all of it comes first"


def _rewards(config: PPOConfig) -> Iterator[str]:
    """What becomes of the scores, in the order in which it is done."""
    algorithm, buffer = config.algorithm, config.algorithm.overlong_buffer
    yield (
        "scores"
        if algorithm.reward_norm is None
        else f"scores normalised ({algorithm.reward_norm})"
    )
    if algorithm.reward_clip is not None:
        yield f"clipped to -/+ {algorithm.reward_clip:g}"
    if buffer.enable:
        yield f"up to -{buffer.penalty_factor:g} in the last {buffer.len} of {config.data.max_response_length} tokens"
    if algorithm.missing_eos_penalty:
        yield f"-{algorithm.missing_eos_penalty:g} where cut off"
    if algorithm.use_kl_in_reward:
        control = algorithm.kl_ctrl
        beta = f"{control.kl_coef:g}"
        if control.type == "adaptive":
            beta += f" (adaptive, target {control.target_kl:g}, horizon {control.horizon})"
        place = (
            "of each token"
            if algorithm.kl_placement == "token"
            else "of the response off its last token"
        )
        yield f"minus {beta} x KL {algorithm.kl_penalty} {place}"
    if algorithm.whiten_rewards:
        yield "whitened"


def _estimator(config: PPOConfig) -> str:
    algorithm = config.algorithm
    words: str = algorithm.adv_estimator
    if is_reference(words):
        return f"{words}, your own, not whitened"
    if words == "gae":
        alpha, critic = algorithm.lam_length_alpha, algorithm.lam_critic
        words += f", gamma {algorithm.gamma}, lambda "
        words += str(algorithm.lam) if alpha is None else f"1 - 1 / ({alpha} x length)"
        return words if critic is None else f"{words}, of the critic's targets {critic}"
    if words == "reinforce_plus_plus":
        return f"{words}, gamma {algorithm.gamma}"
    if words == "remax":
        return f"{words}, against a greedy answer to each prompt"
    if words in ("grpo", "grpo_passk") and not algorithm.norm_adv_by_std_in_grpo:
        return f"{words}, not divided by the standard deviation"
    return f"{words}, divided by {algorithm.f_norm}" if words == "gpg" else words


def _loss(config: PPOConfig) -> str:
    actor, correction = config.actor, config.algorithm.rollout_correction
    mode = actor.policy_loss.loss_mode
    words: str = mode
    if correction.bypass_mode and correction.loss_type == "reinforce":
        words = "reinforce"
    elif is_reference(mode):
        words += f", your own, given clip -{actor.clip_low:g} +{actor.clip_high:g}"
    elif mode in CLIPPED:
        words += f", clip -{actor.clip_low:g} +{actor.clip_high:g}"
        words += f", dual clip {actor.clip_ratio_c:g}" if mode == "vanilla" else ""
    if actor.entropy_coeff:
        words += f", - {actor.entropy_coeff:g} x entropy"
    if actor.positive_lm_coef:
        words += f", + {actor.positive_lm_coef:g} x negative log-likelihood of right responses"
    return words


def _correction(correction: RolloutCorrectionSection) -> str:
    if not correction.active:
        return "none, the mismatch is only measured"
    parts = ["bypass, old = the engine's log-probs" if correction.bypass_mode else "decoupled"]
    if correction.rollout_is is not None:
        lower, upper = correction.bounds
        range_ = f"cut off at {upper:g}" if lower is None else f"0 outside {lower:g}..{upper:g}"
        mean = ", divided by their mean" if correction.rollout_is_batch_normalize else ""
        parts.append(f"{correction.rollout_is} weights {range_}{mean}")
    for statistic, lower, upper in correction.criteria:
        bounds = f"<= {upper:g}" if lower is None else f"in {lower:g}..{upper:g}"
        parts.append(f"kept where {statistic} {bounds}")
    return ", ".join(parts)
