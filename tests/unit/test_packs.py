"""Packs: literal ones, and many made together against one made token by token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mrlhf.batch import Sequences
from mrlhf.parallel.packing import Select, make_packs
from mrlhf.parallel.packs import Pack, lay_flat, lay_in_rows
from mrlhf.parallel.segments import WHOLE, Segments

CPU = torch.device("cpu")
HELD = ("rows", "token_ids", "boundaries", "lengths", "longest", "select", "width")
MADE = ("position_ids", "targets", "places")
SEQUENCES = Sequences.of([[11, 12, 13, 14], [21, 22], [31, 32, 33]], [2, 1, 1])


def _numbers(pack: Pack) -> dict[str, object]:
    """What a pack says of its tokens, as lists and ints; targets where responses are selected."""
    held = {name: vars(pack)[name] for name in HELD}
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
    segments: Segments,
) -> dict[str, object]:
    """The same, made token by token."""
    names = {"token_ids", "select", *MADE} - ({"targets"} if select == "last" else set())
    pack: dict[str, list[int]] = {name: [] for name in names}
    boundaries = [0]
    padded = [(row, segments.padded(len(sequences[row]))) for row in rows]
    filled = sum(length for _, length in padded)
    padding = 0
    while (filled + padding) // segments.size % multiple or padding % segments.count:
        padding += 1

    for row, length in [*padded, *([(None, padding)] if padding else [])]:
        boundaries.append(boundaries[-1] + length)
        tokens = [] if row is None else sequences[row]
        prompt = 0 if row is None else prompt_lengths[row]
        segment_length = length // segments.count
        for position in range(length):
            if position // segment_length not in segments.held:
                continue
            pack["token_ids"].append(tokens[position] if position < len(tokens) else 0)
            pack["position_ids"].append(position)
            column = position - (prompt - 1 if select == "response" else len(tokens) - 1)
            end = len(tokens) - (select == "response")
            if row is not None and column >= 0 and position < end:
                pack["select"].append(len(pack["token_ids"]) - 1)
                pack["places"].append(row * width + column)
                if select == "response":
                    pack["targets"].append(tokens[position + 1])

    sizes = [end - begin for begin, end in itertools.pairwise(boundaries)]
    return {
        "rows": rows,
        **pack,
        "boundaries": boundaries,
        "lengths": [len(sequences[row]) for row in rows],
        "longest": max(sizes),
        "width": width,
    }


@pytest.mark.parametrize("segments", [WHOLE, Segments(0, 2), Segments(1, 2), Segments(2, 3)])
@pytest.mark.parametrize("multiple", [1, 4, 64])
@pytest.mark.parametrize("select", ["response", "last"])
def test_packs_made_together_equal_those_made_token_by_token(
    select: Select, multiple: int, segments: Segments
) -> None:
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
        made = make_packs(wider, packs, select, multiple, CPU, segments)
        assert [_numbers(pack) for pack in made] == [
            _slow_pack(rows, prompt_lengths, pack, select, multiple, width, segments)
            for pack in packs
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


def test_the_last_sequences_of_rows_have_their_numbers_in_one_column() -> None:
    sequences = replace(
        SEQUENCES, rows=torch.tensor([0, 0, 1]), columns=torch.tensor([0, 2, 0]), width=3
    ).last_of_rows()
    [pack] = make_packs(sequences, [[0, 1]], "last", 1, CPU)
    assert pack.places.tolist() == [0, 1]


def test_padding_longer_than_every_sequence_is_the_longest() -> None:
    [pack] = make_packs(Sequences.of([[5], [6]], [1, 1]), [[0]], "last", 8, CPU)
    assert pack.token_ids.tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    assert pack.boundaries.tolist() == [0, 1, 8] and pack.longest == 7


def test_a_response_of_one_token_after_a_prompt_of_one() -> None:
    [pack] = make_packs(Sequences.of([[8, 9]], [1]), [[0]], "response", 1, CPU)
    assert pack.select.tolist() == [0] and pack.targets.tolist() == [9]


def test_numbers_of_rows_are_laid_out_as_a_table() -> None:
    [pack] = make_packs(SEQUENCES, [[1, 0]], "response", 1, CPU)
    assert pack.row_counts.tolist() == [1, 2]
    assert pack.rank_counts.tolist() == [[1, 2]]

    flat = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    table = lay_in_rows(flat, pack.row_counts, pack.width)
    assert table.tolist() == [[1.0, 0.0], [2.0, 3.0]]
    (table * torch.tensor([[5.0, 6.0], [7.0, 8.0]])).sum().backward()
    assert flat.grad is not None and flat.grad.tolist() == [5.0, 7.0, 8.0]


def test_two_ranks_share_a_pack_that_selects_responses() -> None:
    """Sequences of 7 and 3 tokens are padded to 8 and 4, and cut into four segments each."""
    sequences = Sequences.of([[11, 12, 13, 14, 15, 16, 17], [21, 22, 23]], [2, 1])
    first, second = (
        make_packs(sequences, [[0, 1]], "response", 1, CPU, Segments(rank, 2))[0]
        for rank in range(2)
    )
    assert first.boundaries.tolist() == second.boundaries.tolist() == [0, 8, 12]
    assert first.longest == second.longest == 8
    assert first.lengths.tolist() == [7, 3]

    assert first.token_ids.tolist() == [11, 12, 17, 0, 21, 0]
    assert first.position_ids.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.token_ids.tolist() == [13, 14, 15, 16, 22, 23]
    assert second.position_ids.tolist() == [2, 3, 4, 5, 1, 2]

    # Positions 1 to 5 of the first sequence are selected, and 0 and 1 of the second. What follows
    # position 1 lies on the other rank.
    assert first.select.tolist() == [1, 4] and first.targets.tolist() == [13, 22]
    assert first.places.tolist() == [0, 5]
    assert second.select.tolist() == [0, 1, 2, 3, 4]
    assert second.targets.tolist() == [14, 15, 16, 17, 23]
    assert second.places.tolist() == [1, 2, 3, 4, 6]

    for pack in (first, second):
        assert pack.row_counts.tolist() == [5, 2]
        assert pack.rank_counts.tolist() == [[1, 1], [4, 1]]
        assert pack.parts_of_rows.places.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert first.places_among(slice(0, 2)).tolist() == [0, 5]
    assert second.places_among(slice(0, 2)).tolist() == [1, 2, 3, 4, 6]
    assert second.places_among(slice(1, 2)).tolist() == [1]

    table = torch.tensor([[0.0, 1, 2, 3, 4], [5, 6, 0, 0, 0]])
    assert lay_flat({"a": table}, [second])[0]["a"].tolist() == [1.0, 2, 3, 4, 6]
    whole = lay_flat({"a": table, "b": None}, [second], whole_rows=True)[0]
    assert whole["a"].tolist() == [0.0, 1, 2, 3, 4, 5, 6] and whole["b"] is None


def test_two_ranks_share_a_pack_that_selects_last_tokens() -> None:
    sequences = Sequences.of([[11, 12, 13, 14, 15, 16, 17], [21, 22, 23]], [1, 1])
    first, second = (
        make_packs(sequences, [[0, 1]], "last", 4, CPU, Segments(rank, 2))[0] for rank in range(2)
    )
    # The tokens of a rank are a multiple of 4: a padding of four tokens, two for each rank.
    assert first.boundaries.tolist() == [0, 8, 12, 16]
    assert first.token_ids.tolist() == [11, 12, 17, 0, 21, 0, 0, 0]
    assert first.position_ids.tolist() == [0, 1, 6, 7, 0, 3, 0, 3]
    assert first.select.tolist() == [2] and first.places.tolist() == [0]
    assert second.select.tolist() == [5] and second.places.tolist() == [1]


@pytest.mark.parametrize(("segments", "tokens"), [(WHOLE, 3), (Segments(1, 2), 6)])
def test_a_pack_without_rows_is_padding(segments: Segments, tokens: int) -> None:
    empty, pack = make_packs(SEQUENCES, [[], [1]], "response", 3, CPU, segments)
    assert empty.token_ids.tolist() == [0] * tokens
    assert empty.boundaries.tolist() == [0, tokens * segments.size]
    assert empty.longest == tokens * segments.size
    assert len(empty.select) == len(empty.places) == len(empty.row_counts) == 0
    assert pack.row_counts.tolist() == [1]


def test_no_rows_make_no_packs() -> None:
    assert make_packs(SEQUENCES, [], "response", 1, CPU) == []
