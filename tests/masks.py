"""Masks for property tests, and the numbers that a mask keeps."""

from __future__ import annotations

import torch
from hypothesis import strategies as st


@st.composite
def masks(draw):
    """bool [batch, response_len]: empty rows, single tokens, full rows and holes among them."""
    rows = draw(st.integers(1, 4))
    width = draw(st.integers(1, 5))
    row = st.one_of(
        st.just([False] * width),
        st.just([True] * width),
        st.lists(st.booleans(), min_size=width, max_size=width),
    )
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


def kept_rows(table, mask):
    """The numbers of each row of `table` that the mask keeps."""
    return [x[m].tolist() for x, m in zip(table, mask, strict=True)]
