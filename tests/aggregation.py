"""A loss summed over whole sequences, as actor and critic sum theirs over the tokens of a pack."""

from __future__ import annotations

from torch import Tensor

from mrlhf.rl.losses import token_weights
from mrlhf.rl.masking import masked_sum, working_dtype
from mrlhf.rl.names import LossAggMode


def aggregate(
    per_token: Tensor, mask: Tensor, mode: LossAggMode, loss_scale_factor: float
) -> Tensor:
    """The sum that is divided by `aggregation_count`, of tables [batch, response_len]."""
    dtype = working_dtype(per_token)
    return masked_sum(per_token * token_weights(mask, mode, loss_scale_factor, dtype), mask)
