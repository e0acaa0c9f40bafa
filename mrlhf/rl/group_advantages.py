"""Advantages without a critic: a response's score against those of other responses, or its rewards
alone.

Each function takes the rewards of the tokens and returns advantages and returns, both [batch,
response_len] and 0 where the mask is. The score s of a response is the sum of its rewards. Rows
with the same number in `groups` answer one prompt; they need not stand together, nor be equally
many. This file does not know how the rewards were made, nor whether the caller whitens what it
returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.rl.masking import masked_sum
from mrlhf.rl.prompt_groups import STD_EPS, PromptGroups, standardise_in_groups

AdvantagesAndReturns = tuple[Tensor, Tensor]


def grpo(rewards: Tensor, mask: Tensor, groups: Tensor, norm_by_std: bool) -> AdvantagesAndReturns:
    """(s - group mean) / (group std + 1e-6) at every token, https://arxiv.org/abs/2402.03300.

    Without the division that of Dr. GRPO, https://arxiv.org/abs/2503.20783. The std is unbiased; a
    response alone in its group has mean 0 and std 1, as in verl.

    Args:
        rewards: [batch, response_len].
        mask: bool [batch, response_len].
        groups: int64 [batch].
        norm_by_std: whether to divide.
    """
    scores, prompt_groups = _scores(rewards, mask), PromptGroups(groups)
    if norm_by_std:
        return _tiled(standardise_in_groups(scores, prompt_groups), rewards, mask)
    return _tiled(prompt_groups.centred(scores), rewards, mask)


def grpo_passk(
    rewards: Tensor, mask: Tensor, groups: Tensor, norm_by_std: bool
) -> AdvantagesAndReturns:
    """The best response of a group gets what it is ahead of the second, the others 0,
    https://arxiv.org/abs/2503.19595.

    Args:
        rewards: [batch, response_len].
        mask: bool [batch, response_len].
        groups: int64 [batch].
        norm_by_std: whether to divide by the group's unbiased std + 1e-6.

    Raises:
        ValueError: a group has one response only.
    """
    scores, prompt_groups = _scores(rewards, mask), PromptGroups(groups)
    if prompt_groups.single.any():
        raise ValueError(
            "grpo_passk needs at least 2 responses a prompt: set rollout.n to 2 or more"
        )
    best = prompt_groups.highest(scores)
    is_best = scores == best
    # Where two are best, the lead is 0, whichever of them gets it.
    second = prompt_groups.highest(torch.where(is_best, -torch.inf, scores))
    alone = prompt_groups.total(is_best.double()) == 1
    lead = torch.where(is_best & alone, best - second, 0)
    if norm_by_std:
        lead = lead / (prompt_groups.std(prompt_groups.centred(scores)) + STD_EPS)
    return _tiled(lead, rewards, mask)


def rloo(rewards: Tensor, mask: Tensor, groups: Tensor) -> AdvantagesAndReturns:
    """Score less the mean of the others of the group, n / (n - 1) (s - mean),
    https://arxiv.org/abs/2402.14740.

    A response alone in its group keeps its score. Arguments: rewards [batch, response_len], mask
    bool [batch, response_len], groups int64 [batch].
    """
    prompt_groups = PromptGroups(groups)
    scale = prompt_groups.size / (prompt_groups.size - 1).clamp(min=1).double()
    return _tiled(scale * prompt_groups.centred(_scores(rewards, mask)), rewards, mask)


def opo(rewards: Tensor, mask: Tensor, groups: Tensor) -> AdvantagesAndReturns:
    """Score less the length-weighted mean of its group, https://arxiv.org/abs/2505.23585.

    A response alone in its group keeps its score. Arguments as in `rloo`; the length is the number
    of tokens in the mask: those that train, since the weight stands for the size of the gradient.
    """
    lengths = mask.sum(dim=1)
    return _tiled(
        PromptGroups(groups).centred(_scores(rewards, mask), weights=lengths), rewards, mask
    )


def gpg(rewards: Tensor, mask: Tensor, groups: Tensor, f_norm: float) -> AdvantagesAndReturns:
    """alpha (s - group mean) / f_norm with alpha = batch / number of s other than 0,
    https://arxiv.org/abs/2504.02546.

    alpha makes up for prompts that give no gradient; where every s is 0, it is the batch size. A
    response alone in its group keeps its score.

    Args:
        rewards: [batch, response_len] of the whole batch, since alpha is taken over it.
        mask: bool [batch, response_len].
        groups: int64 [batch].
        f_norm: divisor.
    """
    scores = _scores(rewards, mask)
    alpha = len(scores) / scores.count_nonzero().clamp(min=1).double()
    return _tiled(alpha * PromptGroups(groups).centred(scores) / f_norm, rewards, mask)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> AdvantagesAndReturns:
    """Discounted sum of the rewards from each token on, https://arxiv.org/abs/2501.03262; the
    caller whitens it.

    A masked-out position is skipped: the return after it is handed unchanged to the token before
    it.

    Args:
        rewards: [batch, response_len].
        mask: bool [batch, response_len].
        gamma: discount.
    """
    _check(rewards, mask)
    last = rewards.new_zeros(len(rewards))
    returns = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        last = torch.where(mask[:, t], rewards[:, t] + gamma * last, last)
        returns[:, t] = torch.where(mask[:, t], last, 0)
    return returns, returns


def reinforce_plus_plus_baseline(
    rewards: Tensor, mask: Tensor, groups: Tensor
) -> AdvantagesAndReturns:
    """Score less the mean of its group at every token, https://arxiv.org/abs/2501.03262; the caller
    whitens it.

    A response alone in its group keeps its score. Arguments as in `rloo`.
    """
    return _tiled(PromptGroups(groups).centred(_scores(rewards, mask)), rewards, mask)


def remax(rewards: Tensor, mask: Tensor, greedy_scores: Tensor) -> AdvantagesAndReturns:
    """Sum of the rewards from each token on, less the score of the greedy response,
    https://arxiv.org/abs/2310.10505.

    Args:
        rewards: [batch, response_len].
        mask: bool [batch, response_len].
        greedy_scores: [batch], score of the greedy response to each row's prompt.
    """
    _check(rewards, mask)
    assert greedy_scores.shape == rewards.shape[:1], (
        f"{tuple(greedy_scores.shape)} against {tuple(rewards.shape)}"
    )
    kept = rewards.masked_fill(~mask, 0).double()
    to_go = kept.flip(1).cumsum(1).flip(1)
    advantages = to_go - greedy_scores[:, None].double()
    return advantages.masked_fill(~mask, 0).to(rewards.dtype), to_go.masked_fill(~mask, 0).to(
        rewards.dtype
    )


def _scores(rewards: Tensor, mask: Tensor) -> Tensor:
    """Score of each response, float64 [batch]."""
    _check(rewards, mask)
    return masked_sum(rewards.double(), mask, dim=1)


def _tiled(advantages: Tensor, rewards: Tensor, mask: Tensor) -> AdvantagesAndReturns:
    """One advantage a response [batch] at each of its tokens, which are its returns, too; typed as
    the rewards.
    """
    tiled = torch.where(mask, advantages[:, None].to(rewards.dtype), 0)
    return tiled, tiled


def _check(rewards: Tensor, mask: Tensor) -> None:
    assert rewards.shape == mask.shape, (
        f"rewards {tuple(rewards.shape)} against mask {tuple(mask.shape)}"
    )
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"
