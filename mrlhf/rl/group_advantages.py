"""Advantages without a critic: the score of a response against those of other responses, or its
rewards alone.

Each function takes `rewards` [units, response_len], a bool `mask` of the same shape, and
`prompt_groups`, int64 [units]. It returns advantages and returns, both [units, response_len] and 0
outside the mask. The score s of a response is the sum of its rewards. Rows with the same number in
`prompt_groups` answer one prompt. They may stand anywhere in the batch, and prompts may have
different numbers of answers. Rewards may be of any type; results have their `working_dtype`. This
file does not know how the rewards were made, nor whether the caller whitens the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.rl.masking import masked_sum, working_dtype
from mrlhf.rl.prompt_groups import STD_EPS, PromptGroups, standardise_by_prompt

AdvantagesAndReturns = tuple[Tensor, Tensor]


def grpo(
    rewards: Tensor, mask: Tensor, prompt_groups: Tensor, norm_by_std: bool
) -> AdvantagesAndReturns:
    """(s - mean of the prompt group) / (its std + 1e-6), https://arxiv.org/abs/2402.03300.

    Without the division (`norm_by_std`) it is Dr. GRPO, https://arxiv.org/abs/2503.20783. The std
    is unbiased. A response alone in its prompt group has mean 0 and std 1, as in verl.
    """
    scores = response_scores(rewards, mask)
    by_prompt = PromptGroups(prompt_groups)

    if norm_by_std:
        return at_every_token(standardise_by_prompt(scores, by_prompt), rewards, mask)
    return at_every_token(by_prompt.centred(scores), rewards, mask)


def gdpo(
    components: Tensor,
    weights: Sequence[float],
    rewards: Tensor,
    mask: Tensor,
    prompt_groups: Tensor,
    norm_by_std: bool,
) -> AdvantagesAndReturns:
    """Sum over k of w_k (s_k - mean of the prompt group) / (its std + 1e-6).

    Each term s_k of the reward is compared by itself, so that one with a large spread does not
    drown the others, https://arxiv.org/abs/2601.05242. The caller whitens the sum.

    `components` are [terms, units], `weights` one a term. Of the rewards only shape and type count.
    """
    _check(rewards, mask)
    by_prompt = PromptGroups(prompt_groups)
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for scores, weight in zip(components, weights, strict=True):
        if norm_by_std:
            total += weight * standardise_by_prompt(scores, by_prompt)
        else:
            total += weight * by_prompt.centred(scores)
    return at_every_token(total, rewards, mask)


def grpo_passk(
    rewards: Tensor, mask: Tensor, prompt_groups: Tensor, norm_by_std: bool
) -> AdvantagesAndReturns:
    """The best response to a prompt gets its lead over the second, the others get 0.

    The method is that of https://arxiv.org/abs/2503.19595. With `norm_by_std` the lead is divided
    by the unbiased std of the prompt group + 1e-6. A response alone in its prompt group keeps its
    score, as in `grpo`.
    """
    scores = response_scores(rewards, mask)
    by_prompt = PromptGroups(prompt_groups)
    best = by_prompt.highest(scores)
    is_best = scores == best
    # Where two are best, the lead is 0, whichever of them gets it.
    second = by_prompt.highest(torch.where(is_best, -torch.inf, scores))
    second = torch.where(by_prompt.single, 0, second)
    alone = by_prompt.total(is_best.double()) == 1
    lead = torch.where(is_best & alone, best - second, 0)

    if norm_by_std:
        lead = lead / (by_prompt.std(by_prompt.centred(scores)) + STD_EPS)
    return at_every_token(lead, rewards, mask)


def rloo(rewards: Tensor, mask: Tensor, prompt_groups: Tensor) -> AdvantagesAndReturns:
    """Score less the mean of the other answers to the prompt, https://arxiv.org/abs/2402.14740.

    It is n / (n - 1) (s - mean); a response alone in its prompt group keeps its score.
    """
    by_prompt = PromptGroups(prompt_groups)
    scale = by_prompt.size / (by_prompt.size - 1).clamp(min=1).double()
    centred = by_prompt.centred(response_scores(rewards, mask))
    return at_every_token(scale * centred, rewards, mask)


def opo(rewards: Tensor, mask: Tensor, prompt_groups: Tensor) -> AdvantagesAndReturns:
    """Score less the length-weighted mean of its prompt group, https://arxiv.org/abs/2505.23585.

    A response alone in its prompt group keeps its score.
    """
    lengths = mask.sum(dim=1)  # of the tokens that train: the size of the gradient
    scores = response_scores(rewards, mask)
    centred = PromptGroups(prompt_groups).centred(scores, weights=lengths)
    return at_every_token(centred, rewards, mask)


def gpg(
    rewards: Tensor, mask: Tensor, prompt_groups: Tensor, f_norm: float
) -> AdvantagesAndReturns:
    """alpha (s - mean of the prompt group) / f_norm, https://arxiv.org/abs/2504.02546.

    alpha, the batch size over the number of s other than 0, makes up for prompts that give no
    gradient. So the batch must be whole. A response alone in its prompt group keeps its score.
    """
    scores = response_scores(rewards, mask)
    alpha = len(scores) / scores.count_nonzero().clamp(min=1).double()
    centred = PromptGroups(prompt_groups).centred(scores)
    return at_every_token(alpha * centred / f_norm, rewards, mask)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> AdvantagesAndReturns:
    """Discounted sum of the rewards from each token on, https://arxiv.org/abs/2501.03262.

    The caller whitens it. A masked-out position is skipped: the return after it is handed unchanged
    to the token before it.
    """
    _check(rewards, mask)
    rewards = rewards.to(working_dtype(rewards))
    last = rewards.new_zeros(len(rewards))
    returns = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        last = torch.where(mask[:, t], rewards[:, t] + gamma * last, last)
        returns[:, t] = torch.where(mask[:, t], last, 0)
    return returns, returns


def reinforce_plus_plus_baseline(
    rewards: Tensor, mask: Tensor, prompt_groups: Tensor
) -> AdvantagesAndReturns:
    """Score less the mean of its prompt group, to be whitened, https://arxiv.org/abs/2501.03262."""
    centred = PromptGroups(prompt_groups).centred(response_scores(rewards, mask))
    return at_every_token(centred, rewards, mask)


def flash_reinforce(rewards: Tensor, mask: Tensor) -> AdvantagesAndReturns:
    """Score less the mean of all responses, https://github.com/OpenRLHF/OpenRLHF/pull/1339.

    A response of which no token trains does not count, so the batch must be whole.
    """
    scores = response_scores(rewards, mask)
    counts = mask.any(dim=1)
    mean = scores[counts].sum() / counts.sum().clamp(min=1)
    return at_every_token(scores - mean, rewards, mask)


def remax(rewards: Tensor, mask: Tensor, greedy_scores: Tensor) -> AdvantagesAndReturns:
    """Sum of the rewards from each token on, less the score of the greedy response.

    The method is that of https://arxiv.org/abs/2310.10505. `greedy_scores` [units] holds the score
    of the greedy response to each row's prompt.
    """
    _check(rewards, mask)
    assert greedy_scores.shape == rewards.shape[:1], (
        f"{tuple(greedy_scores.shape)} against {tuple(rewards.shape)}"
    )

    kept = rewards.masked_fill(~mask, 0).double()
    to_go = kept.flip(1).cumsum(1).flip(1)
    advantages = to_go - greedy_scores[:, None].double()

    dtype = working_dtype(rewards)
    advantages = advantages.masked_fill(~mask, 0).to(dtype)
    returns = to_go.masked_fill(~mask, 0).to(dtype)
    return advantages, returns


def response_scores(rewards: Tensor, mask: Tensor) -> Tensor:
    """The score of each response, which is the sum of its rewards; float64 [units]."""
    _check(rewards, mask)
    return masked_sum(rewards.double(), mask, dim=1)


def at_every_token(advantages: Tensor, rewards: Tensor, mask: Tensor) -> AdvantagesAndReturns:
    """Repeat each response's advantage [units] at its tokens, as advantages and as returns."""
    repeated = torch.where(mask, advantages[:, None].to(working_dtype(rewards)), 0)
    return repeated, repeated


def _check(rewards: Tensor, mask: Tensor) -> None:
    assert rewards.shape == mask.shape, (
        f"rewards {tuple(rewards.shape)} against mask {tuple(mask.shape)}"
    )
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"
