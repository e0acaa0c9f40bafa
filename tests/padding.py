"""Ragged rows as a table, for batches made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_responses(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Right-pad ragged rows with zeros.

    Returns:
        The padded tensor [batch, response_len] of `dtype` and its bool mask, response_len the
        longest row (>= 1).
    """
    width = max([1, *(len(row) for row in rows)])
    padded = torch.zeros(len(rows), width, dtype=dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(list(row), dtype=dtype)
        mask[i, : len(row)] = True
    return padded, mask
