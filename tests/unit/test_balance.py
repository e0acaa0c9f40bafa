"""Shares and packs: invariants on random lengths, and literal ones of small batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from mrlhf.parallel.balance import pack_rows, split_balanced


def _batches() -> list[list[int]]:
    """Sequence lengths of batches: equal ones, a single row, and many with few long sequences."""
    rng = random.Random(1)
    batches = [[7] * 12, [5]]
    for _ in range(60):
        rows = rng.randint(9, 80)
        batches.append([rng.randint(1, rng.choice((3, 40, 300))) for _ in range(rows)])
    return batches


BATCHES = _batches()


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_balanced_parts_cover_once_and_differ_by_at_most_one_sequence(parts: int) -> None:
    for costs in (batch for batch in BATCHES if len(batch) >= parts):
        shares = split_balanced(costs, parts)
        assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
        assert len(shares) == parts and all(share and share == sorted(share) for share in shares)
        loads = [sum(costs[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(costs)


def test_no_part_is_empty_beside_a_very_long_sequence_or_empty_ones() -> None:
    assert split_balanced([1000, 1, 1], 3) == [[0], [1], [2]]
    assert all(split_balanced([0, 0, 0, 0], 4))


def test_balance_of_a_small_batch() -> None:
    # 9 | 5, then 4 to the 5, 3 to a tie at 9 (the part of fewer sequences), 1 to the smaller.
    assert split_balanced([3, 9, 4, 5, 1], 2) == [[0, 1], [2, 3, 4]]


def test_more_parts_than_sequences_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="2 sequences cannot fill 3 parts"):
        split_balanced([4, 4], 3)


def packs_needed(lengths: Sequence[int], budget: int) -> int:
    """How many packs first-fit-decreasing fills when it looks at every pack for each sequence."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [pack for pack, load in enumerate(loads) if load + length <= budget]
        if fits:
            loads[fits[0]] += length
        else:
            loads.append(length)
    return len(loads)


@pytest.mark.parametrize("budget", [1, 40, 300, 1000, 10**6])
@pytest.mark.parametrize("power", [0, 1, 2])
def test_packs_cover_once_within_the_budget_and_are_as_few_as_by_first_fit(
    budget: int, power: int
) -> None:
    for lengths in BATCHES:
        costs = [length**power for length in lengths]
        packs = pack_rows(lengths, costs, budget)
        assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
        assert packs == sorted(sorted(pack) for pack in packs)
        for pack in packs:
            assert sum(lengths[i] for i in pack) <= budget or len(pack) == 1
        assert len(packs) == packs_needed(lengths, budget)


def test_packs_of_a_small_batch() -> None:
    # First fit needs three packs: 9 + 1 | 5 + 4 | 3. Evened out: 9 | 5 + 1 | 4 + 3.
    lengths = [3, 9, 4, 5, 1]
    assert pack_rows(lengths, lengths, 10) == [[0, 2], [1], [3, 4]]
    assert pack_rows([3, 30, 4], [3, 30, 4], 10) == [[0, 2], [1]]
    assert pack_rows([], [], 10) == []


def test_packs_are_even_in_cost_as_far_as_the_budget_allows() -> None:
    # Two packs are needed. The first sequence costs as much as 16 of the others.
    lengths = [8, 2, 2, 2, 2, 2]
    assert pack_rows(lengths, [64, 4, 4, 4, 4, 4], 16) == [[0], [1, 2, 3, 4, 5]]
    # The cheaper pack has no room for the last sequence, so the emptier one takes it.
    assert pack_rows([1, 8, 3], [10, 5, 1], 10) == [[0, 2], [1]]
    # 6 + 3 | 4 + 4 would leave no room for the other 3, so the packs of first fit stay.
    assert pack_rows([6, 4, 4, 3, 3], [6, 4, 4, 3, 3], 10) == [[0, 1], [2, 3, 4]]
