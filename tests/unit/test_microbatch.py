"""Balance and the cut of a batch: invariants on random lengths, and small literal batches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from mrlhf.batch import Sequences
from mrlhf.parallel.microbatch import (
    BatchCut,
    PackedMiniBatch,
    cut_mini_batches,
    pack_rows,
    split_balanced,
)
from mrlhf.parallel.packs import make_packs


def _batches() -> list[list[int]]:
    """Sequence lengths of batches: equal ones, a single row, and many with few long sequences."""
    rng = random.Random(1)
    batches = [[7] * 12, [5]]
    for _ in range(30):
        rows = rng.randint(9, 40)
        batches.append([rng.randint(1, rng.choice((3, 40, 300))) for _ in range(rows)])
    return batches


BATCHES = _batches()


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_balanced_parts_cover_once_and_differ_by_at_most_one_sequence(parts: int) -> None:
    for lengths in (batch for batch in BATCHES if len(batch) >= parts):
        shares = split_balanced(lengths, parts)
        assert sorted(itertools.chain(*shares)) == list(range(len(lengths)))
        assert len(shares) == parts and all(share and share == sorted(share) for share in shares)
        loads = [sum(lengths[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)


def test_no_part_is_empty_beside_a_very_long_sequence_or_empty_ones() -> None:
    assert split_balanced([1000, 1, 1], 3) == [[0], [1], [2]]
    assert all(split_balanced([0, 0, 0, 0], 4))


def test_balance_of_a_small_batch() -> None:
    # 9 | 5, then 4 to the 5, 3 to a tie at 9 (the part of fewer sequences), 1 to the smaller.
    assert split_balanced([3, 9, 4, 5, 1], 2) == [[0, 1], [2, 3, 4]]


def test_more_parts_than_sequences_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="2 sequences cannot fill 3 parts"):
        split_balanced([4, 4], 3)


@pytest.mark.parametrize("budget", [1, 40, 300, 10**6])
def test_packs_cover_once_within_the_budget(budget: int) -> None:
    for lengths in BATCHES:
        packs = pack_rows(lengths, budget)
        assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in pack) for pack in packs]
        for pack, load in zip(packs, loads, strict=True):
            assert load <= budget or len(pack) == 1
        # First fit leaves no two packs that would go into one.
        assert all(a + b > budget for a, b in itertools.combinations(loads, 2))


def test_packs_of_a_small_batch() -> None:
    # 9 | 5 + 4 | 3, and the 1 goes where it fits first.
    assert pack_rows([3, 9, 4, 5, 1], 10) == [[0], [1, 4], [2, 3]]
    assert pack_rows([3, 30, 4], 10) == [[0, 2], [1]]


def test_which_rows_share_an_optimizer_step_depends_on_the_batch_alone() -> None:
    for lengths in BATCHES[2:]:
        count = len(lengths) - len(lengths) % 8
        wanted = [list(range(begin, begin + 8)) for begin in range(0, count, 8)]

        for dp, budget in itertools.product((1, 2, 4), (1, 50, 10**6)):
            mini_batches = cut_mini_batches(lengths[:count], 8, dp, budget)
            assert [mini_batch.rows for mini_batch in mini_batches] == wanted
            for mini_batch in mini_batches:
                shares = mini_batch.micro_batches
                assert len(shares) == dp and all(shares)
                packs = itertools.chain(*shares)
                assert sorted(itertools.chain(*packs)) == mini_batch.rows


def test_the_last_mini_batch_may_be_smaller() -> None:
    mini_batches = cut_mini_batches([4, 6, 5, 3, 2], mini_batch_rows=3, dp=1, budget=10)
    assert [mini_batch.rows for mini_batch in mini_batches] == [[0, 1, 2], [3, 4]]
    assert mini_batches[0].micro_batches == [[[0, 1], [2]]]
    assert mini_batches[1].micro_batches == [[[3, 4]]]


def test_what_belongs_together_stays_in_one_micro_batch() -> None:
    # Pairs of 10, 8, 9 and 4 tokens; over two ranks 10 + 4 and 9 + 8, which fill two packs each.
    lengths = [4, 6, 5, 3, 2, 7, 2, 2]
    mini_batches = cut_mini_batches(lengths, 8, dp=2, budget=13, together=2)
    assert [mini_batch.rows for mini_batch in mini_batches] == [list(range(8))]
    assert mini_batches[0].micro_batches == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    mini_batches = cut_mini_batches(lengths, 4, dp=1, budget=18, together=2)
    assert [mini_batch.micro_batches for mini_batch in mini_batches] == [
        [[[0, 1, 2, 3]]],
        [[[4, 5, 6, 7]]],
    ]


def test_a_mini_batch_counts_the_rows_of_its_packs_from_its_first() -> None:
    sequences = Sequences.of([[11, 12, 13, 14], [21, 22], [31, 32, 33]], [2, 1, 1])
    packs = make_packs(sequences, [[1], [2]], "response", 1, torch.device("cpu"))
    assert [pack.places.tolist() for pack in packs] == [[2], [4, 5]]
    mini_batch = PackedMiniBatch([1, 2], packs)
    assert [pack.rows for pack in mini_batch.local_packs] == [[0], [1]]
    assert [pack.places.tolist() for pack in mini_batch.local_packs] == [[0], [2, 3]]
    cut = BatchCut([mini_batch, PackedMiniBatch([3], [])])
    assert cut.packs == packs
