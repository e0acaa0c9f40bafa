"""The cut of a batch and its balance: invariants on random lengths, and small literal batches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from mrlhf.batch import Sequences
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.microbatch import (
    Balance,
    BatchCut,
    MiniBatch,
    PackedMiniBatch,
    balance_of,
    cut_mini_batches,
)
from mrlhf.parallel.packing import make_packs


def _batches() -> list[list[int]]:
    """Sequence lengths of batches: equal ones, a single row, and many with few long sequences."""
    rng = random.Random(1)
    batches = [[7] * 12, [5]]
    for _ in range(30):
        rows = rng.randint(9, 40)
        batches.append([rng.randint(1, rng.choice((3, 40, 300))) for _ in range(rows)])
    return batches


BATCHES = _batches()


def test_which_rows_share_an_optimizer_step_depends_on_the_batch_alone() -> None:
    for lengths in BATCHES[2:]:
        count = len(lengths) - len(lengths) % 8
        wanted = [list(range(begin, begin + 8)) for begin in range(0, count, 8)]

        costs = [length**2 for length in lengths[:count]]
        for dp, budget in itertools.product((1, 2, 4), (1, 50, 10**6)):
            mini_batches = cut_mini_batches(lengths[:count], costs, 8, dp, budget)
            assert [mini_batch.rows for mini_batch in mini_batches] == wanted
            for mini_batch in mini_batches:
                shares = mini_batch.micro_batches
                assert len(shares) == dp and all(shares)
                packs = itertools.chain(*shares)
                assert sorted(itertools.chain(*packs)) == mini_batch.rows


def test_the_last_mini_batch_may_be_smaller() -> None:
    lengths = [4, 6, 5, 3, 2]
    mini_batches = cut_mini_batches(lengths, lengths, mini_batch_rows=3, dp=1, budget=10)
    assert [mini_batch.rows for mini_batch in mini_batches] == [[0, 1, 2], [3, 4]]
    assert mini_batches[0].micro_batches == [[[0, 2], [1]]]
    assert mini_batches[1].micro_batches == [[[3, 4]]]


def test_what_belongs_together_stays_in_one_micro_batch() -> None:
    # Pairs of 10, 8, 9 and 4 tokens; over two ranks 10 + 4 and 9 + 8, which fill two packs each.
    lengths = [4, 6, 5, 3, 2, 7, 2, 2]
    mini_batches = cut_mini_batches(lengths, lengths, 8, dp=2, budget=13, together=2)
    assert [mini_batch.rows for mini_batch in mini_batches] == [list(range(8))]
    assert mini_batches[0].micro_batches == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    mini_batches = cut_mini_batches(lengths, lengths, 4, dp=1, budget=18, together=2)
    assert [mini_batch.micro_batches for mini_batch in mini_batches] == [
        [[[0, 1, 2, 3]]],
        [[[4, 5, 6, 7]]],
    ]


def test_ranks_share_the_work_not_the_tokens() -> None:
    # If work grows with the square of the length, one sequence of 8 is worth four of 4.
    lengths = [8, 4, 4, 4, 4]
    costs = [length**2 for length in lengths]
    (mini_batch,) = cut_mini_batches(lengths, costs, 5, dp=2, budget=100)
    assert mini_batch.micro_batches == [[[0]], [[1, 2, 3, 4]]]
    (by_tokens,) = cut_mini_batches(lengths, lengths, 5, dp=2, budget=100)
    assert by_tokens.micro_batches == [[[0, 3]], [[1, 2, 4]]]


def test_balance_over_mini_batches_whose_ranks_wait_for_each_other() -> None:
    # Loads 5 and 3, then 2 and 4: 5 + 4 over the means 4 + 3.
    mini_batches = [
        MiniBatch([0, 1, 2], [[[0]], [[1], [2]]], loads=[5, 3]),
        MiniBatch([3, 4], [[[3]], [[4]]], loads=[2, 4]),
    ]
    balance = balance_of(mini_batches)
    assert balance == Balance(imbalance=9 / 7, micro_batches=5 / 4)
    # A rank without rows counts: 6 and 0.
    assert balance_of([MiniBatch([0], [[[0]], []], loads=[6, 0])]).imbalance == 2


@pytest.mark.parametrize(
    ("sizes", "bubble"),
    [
        (AxisSizes(), {}),
        (AxisSizes(pp=4), {"train/bubble/actor": 3 / 8}),
        (AxisSizes(pp=4, vpp=2), {"train/bubble/actor": 3 / 16}),
    ],
)
def test_a_pipeline_is_predicted_to_lose_a_bubble(
    sizes: AxisSizes, bubble: dict[str, float]
) -> None:
    layout = ParallelLayout.for_world("actor", 4, sizes)
    metrics = Balance(1.5, micro_batches=8.0).metrics("actor", layout)
    assert metrics == {"train/imbalance/actor": 1.5, **bubble}


def test_a_mini_batch_counts_the_rows_of_its_packs_from_its_first() -> None:
    sequences = Sequences.of([[11, 12, 13, 14], [21, 22], [31, 32, 33]], [2, 1, 1])
    packs = make_packs(sequences, [[1], [2]], "response", 1, torch.device("cpu"))
    assert [pack.places.tolist() for pack in packs] == [[2], [4, 5]]
    mini_batch = PackedMiniBatch([1, 2], packs)
    assert [pack.rows for pack in mini_batch.local_packs] == [[0], [1]]
    assert [pack.places.tolist() for pack in mini_batch.local_packs] == [[0], [2, 3]]
    cut = BatchCut([mini_batch, PackedMiniBatch([3], [])], Balance(1.0, 1.0))
    assert cut.packs == packs


def test_ranks_in_step_have_equally_many_micro_batches() -> None:
    for lengths in BATCHES:
        for dp, budget in itertools.product((1, 2, 4), (1, 50, 10**6)):
            plain = cut_mini_batches(lengths, lengths, 8, dp, budget)
            in_step = cut_mini_batches(lengths, lengths, 8, dp, budget, in_step=True)
            for own, padded in zip(plain, in_step, strict=True):
                most = max(map(len, own.micro_batches))
                for share, others in zip(own.micro_batches, padded.micro_batches, strict=True):
                    assert others == share + [[]] * (most - len(share))
            assert balance_of(in_step).imbalance == balance_of(plain).imbalance
