"""Prompts that packs hold once: who shares one, where its tokens stand, and what that spares."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from mrlhf.batch import Sequences
from mrlhf.parallel.microbatch import balance_of, cut_mini_batches
from mrlhf.parallel.packed_sequences import PackedSequences
from mrlhf.parallel.packing import Select, make_packs
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.prefixes import SharedPrompts, prompt_groups, united
from mrlhf.parallel.segments import WHOLE, Segments

CPU = torch.device("cpu")
# Three samples of one prompt, a row of its own, and two samples of another prompt.
ROWS = [[1, 2, 3, 11], [1, 2, 3, 21, 22], [1, 2, 3, 31], [1, 2, 41], [5, 51, 52], [5, 61]]
PROMPTS = [3, 3, 3, 2, 1, 1]
SEQUENCES = Sequences.of(ROWS, PROMPTS)


def test_neighbours_with_the_same_prompt_are_a_group() -> None:
    assert prompt_groups(SEQUENCES).tolist() == [0, 0, 0, 1, 2, 2]
    # Nothing follows the prompt in the second row; the last is like the first, but no neighbour.
    rows = [[1, 2, 3], [1, 2], [1, 2, 4], [9, 8], [1, 2, 5]]
    assert prompt_groups(Sequences.of(rows, [2, 2, 2, 1, 2])).tolist() == [0, 1, 2, 3, 4]


def test_a_pack_holds_a_prompt_once() -> None:
    groups = prompt_groups(SEQUENCES)
    [pack] = make_packs(SEQUENCES, [[0, 1, 2, 3, 4]], "response", 4, CPU, groups=groups)
    assert pack.token_ids.tolist() == [1, 2, 3, 11, 21, 22, 31, 1, 2, 41, 5, 51, 52, 0, 0, 0]
    assert pack.boundaries.tolist() == [0, 3, 4, 6, 7, 10, 13, 16]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert pack.lengths.tolist() == [4, 5, 4, 3, 3] and pack.longest == 3
    # The last token of the prompt is selected for each row that has it.
    assert pack.select.tolist() == [2, 2, 4, 2, 8, 10, 11]
    assert pack.targets.tolist() == [11, 21, 22, 31, 41, 51, 52]
    assert pack.trees is not None
    assert pack.trees.firsts.tolist() == [0, 3, 3, 3, 0, 0, 0]
    assert pack.trees.lengths.tolist() == [3, 1, 2, 1, 3, 3, 0]
    assert pack.trees.ends.tolist() == [1, 2, 3, 4, 5]
    assert pack.trees.prompts.tolist() == [0, 0, 0, 7, 7]
    assert (pack.trees.reach, pack.trees.before) == (5, 9)
    assert pack.trees.repeats == [(3, 2)]

    packed = PackedSequences.of_pack(pack)
    assert packed.owners.tolist() == [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 5, 5, 5, 7, 7, 7]
    assert packed.rows.tolist() == [0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    of_parts = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 0])
    assert packed.rows_of(of_parts).tolist() == [3, 4, 5, 5, 6]
    assert packed.parts_of(torch.tensor([1.0, 2, 3, 4, 5])).tolist() == [6, 1, 2, 3, 4, 5, 0, 0]


class _Group:
    """Stands for the process group of ranks that share sequences, which is not used."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("select", ["response", "last"])
def test_every_token_sees_its_prompt_and_what_is_before_it(select: Select, size: int) -> None:
    rng = random.Random(3)
    every: list[Any] = [Segments(rank, size) for rank in range(size)]

    for _ in range(20):
        rows = []
        prompts = []
        for _ in range(rng.randint(1, 6)):
            prompt = [rng.randint(1, 99) for _ in range(rng.randint(1, 9))]
            for _ in range(rng.randint(1, 4)):
                rows.append(prompt + [rng.randint(1, 99) for _ in range(rng.choice((0, 1, 5, 20)))])
                prompts.append(len(prompt))
        sequences = Sequences.of(rows, prompts)
        groups = prompt_groups(sequences)
        count = rng.randint(1, len(rows))
        order = [list(range(count)), list(range(count, len(rows)))]
        packs = [
            make_packs(sequences, order, select, 2, CPU, segments, groups) for segments in every
        ]
        apart = [make_packs(sequences, order, select, 2, CPU, segments) for segments in every]
        for number in range(len(order)):
            _assert_sees([of_rank[number] for of_rank in packs], rows)
            together = _selected([of_rank[number] for of_rank in packs])
            assert together == _selected([of_rank[number] for of_rank in apart])


def _assert_sees(packs: list[Pack], rows: list[list[int]]) -> None:
    """Each query sees the tokens of one row up to itself."""
    every = torch.cat([pack.token_ids for pack in packs]).tolist()
    wanted = {tuple(rows[row][:end]) for row in packs[0].rows for end in range(len(rows[row]) + 1)}

    for pack in packs:
        group: Any = _Group(len(packs))
        packed = PackedSequences.of_pack(pack, group)
        assert packed.keys is not None
        places = packed.keys.places.tolist()
        assert len(places) == packed.cu_seqlens_kv[-1]
        assert packed.max_seqlen_kv >= max(packed.mask.key_lengths)
        owners = packed.owners.tolist()
        edges = zip(pairwise(packed.cu_seqlens_q), pairwise(packed.cu_seqlens_kv), strict=True)
        for (begin, end), (first, last) in edges:
            seen = [every[place] for place in places[first:last]]
            for query in range(begin, end):
                upto = len(seen) - (int(end) - 1 - query)
                if owners[query] == packed.parts:
                    continue  # padding
                assert tuple(seen[:upto]) in wanted
                assert pack.position_ids[query] == upto - 1
                assert seen[upto - 1] == pack.token_ids[query]


def _selected(packs: list[Pack]) -> dict[int, tuple[int, int]]:
    """The token at each place of a table, and what follows it."""
    return {
        place: (int(pack.token_ids[token]), int(target))
        for pack in packs
        for place, token, target in zip(
            pack.places.tolist(), pack.select.tolist(), pack.target_ids.tolist(), strict=True
        )
    }


def _shared(groups: list[int], prompt: int, rest: int) -> SharedPrompts:
    count = len(groups)
    return SharedPrompts(groups, [prompt] * count, [rest] * count, [prompt] * count)


def test_groups_stay_together_where_there_is_room() -> None:
    shared = _shared([0, 0, 0, 0, 1, 1], prompt=10, rest=5)
    units = [[row] for row in range(6)]
    assert united(units, shared, budget=100, least=1) == [[0, 1, 2, 3], [4, 5]]
    assert united(units, shared, budget=25, least=1) == [[0, 1, 2], [3], [4, 5]]
    assert united(units, shared, budget=100, least=3) == [[0, 1], [2, 3], [4, 5]]
    assert united(units, shared, budget=100, least=9) == units
    # Pairs stay together, and one whose sides differ joins no other.
    assert united([[0, 1], [2, 3], [4, 5]], shared, 100, 1) == [[0, 1, 2, 3], [4, 5]]
    mixed = _shared([0, 0, 0, 1, 1, 1], prompt=10, rest=5)
    assert united([[0, 1], [2, 3], [4, 5]], mixed, 100, 1) == [[0, 1], [2, 3], [4, 5]]


def test_what_sharing_spares() -> None:
    shared = _shared([0, 0, 1, 1], prompt=10, rest=5)
    [cut] = cut_mini_batches([15] * 4, [15] * 4, 4, dp=2, budget=30, shared=shared)
    assert cut.micro_batches == [[[0, 1]], [[2, 3]]]
    assert (cut.tokens, cut.saved, cut.loads) == (40, 20, [20, 20])
    balance = balance_of([cut], shares_prompts=True)
    assert (balance.shared, balance.work) == (20 / 60, 40 / 60)

    # Without shared prompts a micro-batch has room for two rows, whatever they begin with.
    [apart] = cut_mini_batches([15] * 4, [15] * 4, 4, dp=2, budget=30)
    assert (apart.saved, balance_of([apart]).shared, balance_of([apart]).work) == (0, None, 1.0)


def test_without_sharing_nothing_changes() -> None:
    alone = prompt_groups(Sequences.of([[1, 2], [3, 4]], [1, 1]))
    [pack] = make_packs(
        Sequences.of([[1, 2], [3, 4]], [1, 1]), [[0, 1]], "last", 1, CPU, WHOLE, alone
    )
    assert pack.token_ids.tolist() == [1, 2, 3, 4] and pack.select.tolist() == [1, 3]
