"""The per-token loss of the critic, and how the tokens of any loss are summed over a mini-batch.

A loss is a sum and a count. The sums of micro-batches, wherever they run, add up to the sum of the
mini-batch, which is divided once by the count of the whole (global) mini-batch. So the gradient
does not depend on how the mini-batch was split, as long as no sequence was split. This file does
not know the split, nor which terms a role adds up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.rl.masking import working_dtype
from mrlhf.rl.names import LossAggMode


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss; each field [batch, response_len]."""

    per_token: Tensor  # the loss, to be aggregated
    clipped: Tensor  # bool, whether the clipped branch was taken


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> ValueLoss:
    """Half the larger squared error: that of the prediction, or of the clipped prediction.

    The prediction is clipped to at most `clip_range` from the old one, as in the PPO authors' code,
    described in https://arxiv.org/abs/2005.12729, section 3. All tensors are [batch, response_len]:
    predictions of the critic that is trained, those before this step's updates, and the targets.
    """
    assert values.shape == old_values.shape == returns.shape

    values = values.to(working_dtype(values))
    old_values = old_values.to(working_dtype(old_values))
    returns = returns.to(working_dtype(returns))
    near_old = values.clamp(old_values - clip_range, old_values + clip_range)
    unclipped = (values - returns).square()
    clipped = (near_old - returns).square()

    return ValueLoss(per_token=0.5 * torch.maximum(unclipped, clipped), clipped=clipped > unclipped)


def token_weights(
    mask: Tensor, mode: LossAggMode, loss_scale_factor: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight of each token in the sum of a loss over whole sequences.

    The caller divides the sum over the global mini-batch by its `aggregation_count`. `token-mean`
    is that of DAPO, https://arxiv.org/abs/2503.14476; `seq-mean-token-sum-norm` that of Dr. GRPO,
    https://arxiv.org/abs/2503.20783, which divides by `loss_scale_factor` tokens;
    `seq-mean-token-mean` that of GRPO, https://arxiv.org/abs/2402.03300. The mask and the result
    are [batch, response_len]; a row holds a whole response, padded.
    """
    kept = mask.to(dtype)
    if mode == "seq-mean-token-mean":
        return kept / kept.sum(dim=1, keepdim=True).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        return kept / loss_scale_factor
    return kept


def aggregation_count(token_count: int, sequence_count: int, mode: LossAggMode) -> float:
    """The number by which the sum of a loss over a mini-batch is divided, once.

    It is 1 where there is nothing to count, since every sum is 0 there. `token_count` are the
    response tokens of the global mini-batch that the mask keeps, `sequence_count` its sequences.
    """
    counts: dict[LossAggMode, int] = {
        "token-mean": token_count,
        "token-sum": 1,
        "seq-mean-token-sum": sequence_count,
        "seq-mean-token-sum-norm": sequence_count,
        "seq-mean-token-mean": sequence_count,
    }
    return float(max(counts[mode], 1))
