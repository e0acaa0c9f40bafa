"""Packs: literal ones, and many made together against one made token by token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mrlhf.batch import Sequences
from mrlhf.parallel.packs import Pack, Select, lay_in_rows, make_packs

CPU = torch.device("cpu")
MADE = ("position_ids", "targets", "places")
SEQUENCES = Sequences.of([[11, 12, 13, 14], [21, 22], [31, 32, 33]], [2, 1, 1])


def _numbers(pack: Pack) -> dict[str, object]:
    """All that a pack says, as lists and ints; the targets where responses are selected."""
    held = {name: value for name, value in vars(pack).items() if name != "counts"}
    made = {name: getattr(pack, name) for name in MADE if name != "targets" or pack.width > 1}
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in (held | made).items()
    }


def _slow_pack(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    rows: list[int],
    select: Select,
    multiple: int,
    width: int,
) -> dict[str, object]:
    """The same, made row by row of lists."""
    names = {"token_ids", "select", *MADE} - ({"targets"} if select == "last" else set())
    pack: dict[str, list[int]] = {name: [] for name in names}
    boundaries = [0]
    for row in rows:
        tokens = sequences[row]
        begin = boundaries[-1]
        pack["token_ids"] += tokens
        pack["position_ids"] += range(len(tokens))
        boundaries.append(begin + len(tokens))

        columns = 1
        first = len(tokens) - 1
        if select == "response":
            columns = len(tokens) - prompt_lengths[row]
            first = prompt_lengths[row] - 1
        for column in range(columns):
            pack["select"].append(begin + first + column)
            if select == "response":
                pack["targets"].append(tokens[first + column + 1])
            pack["places"].append(row * width + column)

    padding = -boundaries[-1] % multiple
    if padding:
        pack["token_ids"] += [0] * padding
        pack["position_ids"] += range(padding)
        boundaries.append(boundaries[-1] + padding)
    sizes = [end - begin for begin, end in itertools.pairwise(boundaries)]
    return {
        "rows": rows,
        **pack,
        "boundaries": boundaries,
        "longest": max(sizes),
        "width": width,
    }


@pytest.mark.parametrize("multiple", [1, 4, 64])
@pytest.mark.parametrize("select", ["response", "last"])
def test_packs_made_together_equal_those_made_row_by_row(select: Select, multiple: int) -> None:
    rng = random.Random(2)
    for _ in range(20):
        prompt_lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 30))]
        rows = [
            [rng.randint(1, 99) for _ in range(prompt + rng.choice((0, 1, 5, 30)))]
            for prompt in prompt_lengths
        ]
        order = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
        cuts = sorted(rng.sample(range(1, len(order)), min(3, len(order) - 1)))
        bounds = zip([0, *cuts], [*cuts, len(order)], strict=True)
        packs = [order[begin:end] for begin, end in bounds]

        sequences = Sequences.of(rows, prompt_lengths)
        wider = replace(sequences, width=sequences.width + 2)
        width = wider.width if select == "response" else 1
        made = make_packs(wider, packs, select, multiple, CPU)
        assert [_numbers(pack) for pack in made] == [
            _slow_pack(rows, prompt_lengths, pack, select, multiple, width) for pack in packs
        ]


def test_a_pack_that_selects_responses() -> None:
    [pack] = make_packs(SEQUENCES, [[0, 2]], "response", 4, CPU)
    assert pack.rows == [0, 2]
    assert pack.token_ids.tolist() == [11, 12, 13, 14, 31, 32, 33, 0]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert pack.boundaries.tolist() == [0, 4, 7, 8] and pack.boundaries.dtype == torch.int32
    assert pack.longest == 4
    # The prompt of row 0 ends at position 1, that of row 2 at position 4; what follows each
    # position is its target.
    assert pack.select.tolist() == [1, 2, 4, 5]
    assert pack.targets.tolist() == [13, 14, 32, 33]
    # Row 2 begins at place 4 of a table of two columns.
    assert pack.places.tolist() == [0, 1, 4, 5]
    # What a pack holds is of the smallest type; what indexes is int64.
    assert pack.token_ids.dtype == pack.select.dtype == torch.int32
    made = (pack.position_ids, pack.targets, pack.places)
    assert {tensor.dtype for tensor in made} == {torch.int64}


def test_a_pack_that_selects_last_tokens() -> None:
    [pack] = make_packs(SEQUENCES, [[1, 2, 0]], "last", 1, CPU)
    assert pack.token_ids.tolist() == [21, 22, 31, 32, 33, 11, 12, 13, 14]
    assert pack.boundaries.tolist() == [0, 2, 5, 9]
    assert pack.select.tolist() == [1, 4, 8]
    assert pack.places.tolist() == [1, 2, 0]


def test_padding_longer_than_every_sequence_is_the_longest() -> None:
    [pack] = make_packs(Sequences.of([[5], [6]], [1, 1]), [[0]], "last", 8, CPU)
    assert pack.token_ids.tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    assert pack.boundaries.tolist() == [0, 1, 8] and pack.longest == 7


def test_a_response_of_one_token_after_a_prompt_of_one() -> None:
    [pack] = make_packs(Sequences.of([[8, 9]], [1]), [[0]], "response", 1, CPU)
    assert pack.select.tolist() == [0] and pack.targets.tolist() == [9]


def test_numbers_of_some_rows_of_a_pack_are_laid_out_as_a_table() -> None:
    [pack] = make_packs(SEQUENCES, [[1, 0]], "response", 1, CPU)
    assert pack.counts_in(slice(0, 3)).tolist() == [1, 2]
    assert pack.counts_in(slice(0, 1)).tolist() == [1]
    assert pack.counts_in(slice(1, 3)).tolist() == [2]

    flat = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    table = lay_in_rows(flat, pack.counts, pack.width)
    assert table.tolist() == [[1.0, 0.0], [2.0, 3.0]]
    (table * torch.tensor([[5.0, 6.0], [7.0, 8.0]])).sum().backward()
    assert flat.grad is not None and flat.grad.tolist() == [5.0, 7.0, 8.0]


def test_no_rows_make_no_packs() -> None:
    assert make_packs(SEQUENCES, [], "response", 1, CPU) == []


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_pack_without_rows_is_all_padding(multiple: int) -> None:
    first, empty = make_packs(SEQUENCES, [[1, 0], []], "response", multiple, CPU)
    assert empty.rows == [] and empty.token_ids.tolist() == [0] * multiple
    assert empty.boundaries.tolist() == [0, multiple] and empty.longest == multiple
    assert empty.select.tolist() == [] and empty.counts.tolist() == []
    [alone] = make_packs(SEQUENCES, [[1, 0]], "response", multiple, CPU)
    assert _numbers(first) == _numbers(alone)
