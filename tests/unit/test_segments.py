"""Which tokens context-parallel ranks hold, and where they find those that they may see."""

from __future__ import annotations

import torch

from mrlhf.parallel.key_exchange import seen_places
from mrlhf.parallel.segments import WHOLE, Segments


def test_each_rank_has_a_segment_of_either_end() -> None:
    assert WHOLE.count == 1 and WHOLE.held == (0,)
    assert [Segments(rank, 3).held for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert Segments(1, 3).count == 6
    assert Segments(0, 2).of_all_ranks == [Segments(0, 2), Segments(1, 2)]


def test_sequences_are_padded_so_that_segments_are_equally_long() -> None:
    assert WHOLE.padded(7) == 7
    assert Segments(0, 2).padded(7) == 8
    assert Segments(0, 2).padded(torch.tensor([1, 4, 9])).tolist() == [4, 4, 12]
    # A rank of two has half of a pack's tokens, and half of 12 is a multiple of 3.
    assert Segments(0, 2).pack_multiple(3) == 12
    assert Segments(0, 2).pack_multiple(2) == 4
    assert WHOLE.pack_multiple(3) == 3


def test_the_places_of_what_each_segment_may_see() -> None:
    """Two ranks have 8 and 4 tokens in segments of 2 and 1.

    The first has tokens 0 1 6 7 of the first sequence, at places 0 to 3, and 0 3 of the second, at
    4 and 5; the second has 2 3 4 5 at places 6 to 9, and 1 2 at 10 and 11.
    """
    boundaries = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert seen_places(boundaries, 6, Segments(0, 2)).tolist() == [
        *(0, 1),
        *(0, 1, 6, 7, 8, 9, 2, 3),
        4,
        *(4, 10, 11, 5),
    ]
    assert seen_places(boundaries, 6, Segments(1, 2)).tolist() == [
        *(0, 1, 6, 7),
        *(0, 1, 6, 7, 8, 9),
        *(4, 10),
        *(4, 10, 11),
    ]
