"""Numbers of whole sequences, of which each context-parallel rank has computed a part.

It is for losses that need all numbers of a sequence at once. Every rank evaluates such a loss on
the same numbers, and differentiates it in its own alone. This file knows no loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.packs import Pack


def gather_rows(
    numbers: Tensor, pack: Pack, group: dist.ProcessGroup, rows: slice = slice(None)
) -> Tensor:
    """The numbers of all selected positions of whole rows; gradients reach this rank's own alone.

    The ranks that share the sequences call it together, for the same rows.

    Args:
        numbers: [channels, selected], of this rank's selected positions of these rows.
        pack: holds the rows.
        group: the ranks that share the sequences.
        rows: which of the pack's rows, counted from its first.

    Returns:
        [channels, selected], one row after the other.
    """
    if pack.segments.size == 1:
        return numbers
    places = pack.places_among(rows).to(numbers.device)
    total = int(pack.row_counts[rows].sum())
    whole = numbers.new_zeros((len(numbers), total))
    with torch.no_grad():
        whole.index_copy_(1, places, numbers)
        # Each number is on one rank; the others add zeros.
        dist.all_reduce(whole, group=group)
    return whole.index_copy(1, places, numbers)
