"""From one score a response to one reward a token, KL penalty included.

This file does not know who gave the score or how the KL was estimated.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mrlhf.rl.masking import masked_sum

KlPlacement = Literal["token", "terminal"]


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None, kl_coef: float, placement: KlPlacement) -> Tensor:
    """Place each score on the last valid token of its response and take the KL penalty off.

    The penalised reward of https://arxiv.org/abs/1909.08593, equation 2, spread over tokens as in
    https://arxiv.org/abs/2203.02155. A response without valid tokens gets no reward.

    Args:
        scores: [batch], one a response.
        mask: bool [batch, response_len].
        kl: [batch, response_len], KL of each token, or None for no penalty.
        kl_coef: coefficient of the penalty.
        placement: `token` takes each token's KL off its own reward, `terminal` their sum off the last one's.

    Returns:
        [batch, response_len], float like `scores`, 0 where the mask is.
    """
    assert scores.shape == mask.shape[:1], f"scores {tuple(scores.shape)} against mask {tuple(mask.shape)}"
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"
    positions = torch.arange(mask.shape[1], dtype=torch.int64, device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    is_last = positions == last
    if kl is None:
        return torch.where(is_last, scores[:, None], 0)
    if placement == "terminal":
        return torch.where(is_last, (scores - kl_coef * masked_sum(kl, mask, dim=1))[:, None], 0)
    return torch.where(is_last, scores[:, None], 0) - kl_coef * kl.masked_fill(~mask, 0)
