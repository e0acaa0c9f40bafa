"""Batches of token rewards drawn at random, with rows of every kind of mask and NaN wherever the
mask is False.

Numbers are eighths, so that ties and scores of exactly 0 come up and float64 sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st
from torch import Tensor

ROW_KINDS = ("empty", "one token", "full", "prefix", "holes")


@dataclass(frozen=True)
class MaskedBatch:
    """A batch as estimators see it."""

    rewards: Tensor  # float64 [batch, response_len]
    values: Tensor  # float64 [batch, response_len]
    mask: Tensor  # bool [batch, response_len]
    prompt_groups: Tensor  # int64 [batch]
    greedy_scores: Tensor  # float64 [batch]

    def rows(self, order: Tensor) -> MaskedBatch:
        return MaskedBatch(
            **{field.name: getattr(self, field.name)[order] for field in fields(self)}
        )


def _mask_row(kind: str, width: int, generator: torch.Generator) -> Tensor:
    positions = torch.arange(width)
    length = int(torch.randint(0, width + 1, (), generator=generator))
    return {
        "empty": positions < 0,
        "one token": positions == min(length, width - 1),
        "full": positions >= 0,
        "prefix": positions < length,
        "holes": torch.rand(width, generator=generator) < 0.6,
    }[kind]


@st.composite
def masked_batches(draw, row_kinds=ROW_KINDS, smallest_group=1):
    width = draw(st.integers(1, 6))
    drawn = draw(st.lists(st.sampled_from([-4, 0, 3, 10**12]), min_size=1, max_size=6))
    prompt_groups = torch.tensor(drawn * smallest_group)

    kinds = draw(
        st.lists(
            st.sampled_from(row_kinds), min_size=len(prompt_groups), max_size=len(prompt_groups)
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.stack([_mask_row(kind, width, generator) for kind in kinds])

    rewards, values = (
        (torch.randint(-8, 9, (2, *mask.shape), generator=generator) / 8)
        .double()
        .masked_fill(~mask, torch.nan)
    )
    greedy_scores = (torch.randint(-8, 9, (len(prompt_groups),), generator=generator) / 8).double()
    return MaskedBatch(rewards, values, mask, prompt_groups, greedy_scores)
