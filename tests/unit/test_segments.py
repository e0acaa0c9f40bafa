"""Which tokens context-parallel ranks hold, and where they find those that they may see."""

from __future__ import annotations

from typing import Any

import torch

from mrlhf.batch import Sequences
from mrlhf.parallel.key_exchange import KeyExchange, seen_places
from mrlhf.parallel.packed_sequences import PackedSequences
from mrlhf.parallel.packing import make_packs
from mrlhf.parallel.segments import WHOLE, Segments

CPU = torch.device("cpu")
SEQUENCES = Sequences.of([[11, 12, 13, 14, 15, 16, 17], [21, 22, 23]], [2, 1])


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


class _Group:
    """Stands for the process group of two ranks, which is not used."""

    def size(self) -> int:
        return 2


def test_what_the_layers_need_to_know_of_a_shared_pack() -> None:
    group: Any = _Group()

    for rank, query_edges, key_edges, owners in (
        (0, [0, 2, 4, 5, 6], [0, 2, 10, 11, 15], [0, 0, 0, 2, 1, 2]),
        (1, [0, 2, 4, 5, 6], [0, 4, 10, 12, 15], [0, 0, 0, 0, 1, 1]),
    ):
        [pack] = make_packs(SEQUENCES, [[0, 1]], "response", 1, CPU, Segments(rank, 2))
        packed = PackedSequences.of_pack(pack, group)
        assert packed.cu_seqlens_q.tolist() == query_edges
        assert packed.cu_seqlens_kv.tolist() == key_edges
        assert packed.cu_seqlens_q.dtype == packed.cu_seqlens_kv.dtype == torch.int32
        assert packed.max_seqlen_q == 2
        assert packed.max_seqlen_kv == max(packed.mask.key_lengths)
        assert isinstance(packed.keys, KeyExchange)
        assert len(packed.keys.places) == key_edges[-1]
        assert packed.owners.tolist() == owners


def test_what_the_layers_need_to_know_of_a_whole_pack() -> None:
    [pack] = make_packs(SEQUENCES, [[0, 1]], "response", 4, CPU)
    packed = PackedSequences.of_pack(pack)
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 7, 10, 12]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 7
    assert packed.keys is None
    assert packed.owners.tolist() == [0] * 7 + [1] * 3 + [2] * 2
    assert packed.mask.query_lengths == packed.mask.key_lengths == [7, 3, 2]
