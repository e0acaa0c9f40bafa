"""From a scored rollout to what the updates need: KL, token rewards, advantages, whitening.

Works on the global batch, which every rank holds, so that whitening and metrics need no communication and come out the
same on every layout. It does not know the models whose numbers it is given.
"""

from __future__ import annotations

from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.sections import AlgorithmSection
from mrlhf.rl.advantages import ADVANTAGE_ESTIMATORS
from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.masking import local_moments, masked_mean, whiten
from mrlhf.rl.shaping import token_rewards
from mrlhf.roles.actor import Evaluation


def make_experience(
    rollout: Rollout,
    scores: Tensor,
    old: Evaluation,
    ref_logprobs: Tensor | None,
    values: Tensor,
    algorithm: AlgorithmSection,
    kl_coef: float,
) -> tuple[Experience, float | None]:
    """Shape rewards and estimate advantages.

    Args:
        rollout: the global batch.
        scores: [batch], before any KL.
        old: the policy's log-probabilities and, for `kl_penalty: full`, its KL to the reference.
        ref_logprobs: [batch, response_len] or None, of the reference.
        values: [batch, response_len], of the critic.
        algorithm: estimator, discount, KL.
        kl_coef: coefficient of the KL in the reward now.

    Returns:
        The experience, and the KL in the reward: mean over sequences of the mean over their tokens, None if not in use.
    """
    mask = rollout.response_mask
    kl = _reward_kl(old, ref_logprobs, algorithm) if algorithm.use_kl_in_reward else None
    rewards = token_rewards(scores, mask, kl, kl_coef, algorithm.kl_placement)
    estimate = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator]
    advantages, returns = estimate(rewards, values, mask, algorithm.gamma, algorithm.lam)
    experience = Experience(
        rollout=rollout,
        scores=scores,
        old_logprobs=old.logprobs,
        ref_logprobs=ref_logprobs,
        token_rewards=rewards,
        values=values,
        advantages=whiten(advantages, mask, local_moments(advantages, mask)),
        returns=returns,
    )
    return experience, None if kl is None else float(masked_mean(kl, mask, dim=1).mean())


def _reward_kl(old: Evaluation, ref_logprobs: Tensor | None, algorithm: AlgorithmSection) -> Tensor:
    if algorithm.kl_penalty == "full":
        assert old.full_kl is not None
        return old.full_kl
    assert ref_logprobs is not None
    return kl_penalty(old.logprobs, ref_logprobs, algorithm.kl_penalty)
