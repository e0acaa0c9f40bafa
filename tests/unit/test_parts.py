"""Parts of flat tensors: where they stand, what they hold, and what is written into them."""

from __future__ import annotations

import torch

from mrlhf.records import Parts

PARTS = Parts(torch.tensor([5, 0, 3]), torch.tensor([2, 3, 0]))


def test_places_and_numbers_of_parts_that_overlap_none():
    flat = torch.arange(10, 20)
    assert PARTS.places.tolist() == [5, 6, 0, 1, 2]
    assert PARTS.of(flat).tolist() == [15, 16, 10, 11, 12]
    assert PARTS.of(flat > 12).tolist() == [True, True, False, False, False]

    pairs = torch.stack([flat, -flat], dim=1)
    assert PARTS.of(pairs).tolist() == [[15, -15], [16, -16], [10, -10], [11, -11], [12, -12]]


def test_numbers_are_a_copy():
    flat = torch.arange(10)
    Parts(torch.tensor([0]), torch.tensor([10])).of(flat)[0] = 7
    assert flat[0] == 0


def test_put_writes_into_the_parts_alone():
    table = torch.zeros(2, 8)
    PARTS.put(table, torch.tensor([[1.0, 2, 3, 4, 5], [6, 7, 8, 9, 10]]))
    assert table.tolist() == [[3.0, 4, 5, 0, 0, 1, 2, 0], [8.0, 9, 10, 0, 0, 6, 7, 0]]


def test_join_and_no_parts_at_all():
    none = Parts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert none.places.tolist() == [] and none.of(torch.arange(4)).tolist() == []
    joined = Parts.join([PARTS, none, PARTS])
    assert joined.places.tolist() == [5, 6, 0, 1, 2, 5, 6, 0, 1, 2]
