"""From one score a response to one reward a token: penalties, normalisation, minus the KL.

This file does not know who gave the score or how the KL was estimated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.rl.masking import Moments, masked_sum, working_dtype
from mrlhf.rl.names import KlPlacement
from mrlhf.rl.prompt_groups import STD_EPS, PromptGroups, standardise_by_prompt


def token_rewards(
    scores: Tensor, mask: Tensor, kl: Tensor | None, kl_coef: float, placement: KlPlacement
) -> Tensor:
    """Place each score on the last token of its mask and subtract the KL penalty.

    The penalised reward is that of https://arxiv.org/abs/1909.08593, equation 2, spread over tokens
    as in https://arxiv.org/abs/2203.02155. A response whose mask is empty gets no reward.

    Args:
        scores: [batch], one a response.
        mask: bool [batch, response_len].
        kl: [batch, response_len], the KL of each token, or None for no penalty.
        kl_coef: coefficient of the penalty.
        placement: `token` subtracts each token's KL from its own reward, `terminal` subtracts their
            sum from the reward of the last token.

    Returns:
        [batch, response_len], in the `working_dtype` of `scores`, 0 outside the mask.
    """
    assert scores.shape == mask.shape[:1], (
        f"scores {tuple(scores.shape)} against mask {tuple(mask.shape)}"
    )
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"

    tokens_to_come = mask.flip(1).cumsum(1).flip(1)
    is_last = mask & (tokens_to_come == 1)
    scores = scores.to(working_dtype(scores))

    if kl is None:
        return torch.where(is_last, scores[:, None], 0)
    kl = kl.to(working_dtype(kl))
    if placement == "terminal":
        penalised = scores - kl_coef * masked_sum(kl, mask, dim=1)
        return torch.where(is_last, penalised[:, None], 0)
    return torch.where(is_last, scores[:, None], 0) - kl_coef * kl.masked_fill(~mask, 0)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """The penalty of a response that ends in the last `buffer` tokens before the limit.

    As in DAPO, https://arxiv.org/abs/2503.14476, equation 13, a straight line from 0 to -factor at
    `max_length`, where a response is cut; float64 [batch], at most 0.
    """
    assert 0 < buffer <= max_length, (
        f"an overlong buffer of {buffer} tokens does not fit into {max_length}"
    )
    below_buffer = (max_length - buffer) - lengths.double()
    return (below_buffer / buffer * factor).clamp(max=0)


def missing_eos_penalty(stopped: Tensor, penalty: float) -> Tensor:
    """-penalty for each response that did not end by itself, else 0; float64 [batch]."""
    assert stopped.dtype == torch.bool, f"stopped is bool, this one is {stopped.dtype}"
    assert penalty >= 0, f"a penalty of {penalty} would reward responses that are cut"
    nothing = torch.zeros(stopped.shape, dtype=torch.float64, device=stopped.device)
    return nothing.masked_fill(~stopped, -penalty)


def normalise_scores(scores: Tensor, moments: Moments) -> Tensor:
    """(score - mean) / (std + 1e-6) by these `moments`, [batch], in `working_dtype`."""
    centred = scores.double() - moments.mean
    return (centred / (moments.variance**0.5 + STD_EPS)).to(working_dtype(scores))


def normalise_by_prompt(scores: Tensor, prompt_groups: Tensor) -> Tensor:
    """(score - mean of the prompt group) / (its std + 1e-6), [batch]; alone: mean 0 and std 1."""
    by_prompt = PromptGroups(prompt_groups)
    return standardise_by_prompt(scores, by_prompt).to(working_dtype(scores))
