"""Lays sequences end to end as packs.

All packs of a rank's share are made together by a few operations on flat tensors, and each pack
is a view of the result. With context parallelism a rank's pack has its segments of each sequence,
and what it needs to know of the segments of the others. This file does not know which rows stand in
which pack, nor why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.device import send
from mrlhf.parallel.packs import Pack, Trees
from mrlhf.parallel.segments import WHOLE, Segments
from mrlhf.records import Parts

Select = Literal["response", "last"]


@dataclass(frozen=True)
class _Layout:
    """The places of everything when all packs are laid end to end, over all ranks; int64.

    What is laid are parts: rows, or the parts of rows that share prompts.
    """

    rows: Tensor  # [rows], in the order of the packs
    rows_in: Tensor  # [packs], the number of rows of each pack
    row_pack: Tensor  # [rows], the pack of each row
    row_ends: Tensor  # [rows], the part that each row ends with
    prompts: Tensor | None  # [rows], the part of its shared prompt, -1 for none
    sources: Tensor  # [parts], a row that has each part
    firsts: Tensor  # [parts], the position of each part's first token in its row
    lengths: Tensor  # [parts], tokens of each part
    pack_of: Tensor  # [parts], the pack of each part
    begins: Tensor  # [parts], the beginning of each part
    padded: Tensor  # [parts], tokens of each part with its own padding
    parts_in: Tensor  # [packs], the number of parts of each pack
    padding: Tensor  # [packs], tokens after the last part of each pack
    ends: Tensor  # [packs], the end of each pack, its padding included

    @property
    def pack_begins(self) -> Tensor:
        """Where each pack begins, [packs]."""
        return torch.nn.functional.pad(self.ends[:-1], (1, 0))

    def within(
        self, segments: Segments, parts: Tensor, first: Tensor, end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The positions from `first` up to `end`, [parts], in each segment that a rank holds.

        Returns:
            Three tensors of [parts, segments]: the first of the positions, their number, and the
            place of the first, if the rank's packs are laid end to end.
        """
        held = torch.tensor(segments.held, dtype=torch.int64)
        sizes = (self.padded[parts] // segments.count)[:, None]  # of a segment, with padding
        positions = self.firsts[parts][:, None] + sizes * held  # of its first token, in the row
        begins = (self.begins[parts] // segments.size)[:, None] + sizes * torch.arange(len(held))
        part_ends = (self.firsts + self.lengths)[parts][:, None]

        low = torch.maximum(positions, first[:, None])
        high = torch.minimum(positions + sizes, end[:, None]).minimum(part_ends)
        return low, (high - low).clamp(min=0), begins + low - positions


def make_packs(
    sequences: Sequences,
    packs: Sequence[list[int]],
    select: Select,
    multiple: int,
    device: torch.device,
    segments: Segments = WHOLE,
    groups: Tensor | None = None,
) -> list[Pack]:
    """Lay sequences end to end, and move the packs to `device`.

    Args:
        packs: the sequences of each. One without any is all padding: other ranks have more packs.
        select: "response": for each response token the position before it (where its log-prob and
            value come from), in tables as wide as `sequences.width`; "last": each sequence's last
            token, in tables of one column.
        multiple: each pack's token count on this rank is padded to a multiple of this, as a last
            sequence of zeros.
        segments: those that this rank holds. Each sequence is padded with zeros, so that its
            segments are equally long.
        groups: int64 [rows of the batch]; neighbours in a pack that have the same number share
            their prompt, and the pack has it once. None: every row has its own.
    """
    if not packs:
        return []
    laid = _lay(sequences, packs, segments, multiple, groups)
    token_ids = _token_ids(sequences, laid, segments)

    edges_in, boundaries = _boundaries(laid)
    longest = torch.maximum(_largest(laid, laid.padded), laid.padding)

    # A table of one column has no place for sequences of a row that follow each other.
    firsts = sequences.columns if select == "response" else torch.zeros_like(sequences.columns)
    tokens_in = ((laid.ends - laid.pack_begins) // segments.size).tolist()
    fields_of: dict[str, Sequence[Any]] = {
        "rows": [rows.tolist() for rows in sequences.rows[laid.rows].split(laid.rows_in.tolist())],
        "token_ids": send(token_ids, device).split(tokens_in),
        "boundaries": send(boundaries, device).split(edges_in.tolist()),
        "firsts": firsts[laid.rows].split(laid.rows_in.tolist()),
        "lengths": sequences.lengths[laid.rows].int().split(laid.rows_in.tolist()),
        "longest": longest.tolist(),
        "trees": _trees(laid, edges_in, device),
        **_selected(sequences, laid, segments, select, device),
    }
    width = sequences.width if select == "response" else 1
    made = [
        Pack(**dict(zip(fields_of, fields, strict=True)), width=width, segments=segments)
        for fields in zip(*fields_of.values(), strict=True)
    ]
    if sequences.masks is None or select == "last":
        return made
    masks = sequences.masks.by_place()
    return [replace(pack, masks=masks.of_rows(pack.places)) for pack in made]


def _lay(
    sequences: Sequences,
    packs: Sequence[list[int]],
    segments: Segments,
    multiple: int,
    groups: Tensor | None,
) -> _Layout:
    rows = torch.tensor(list(chain.from_iterable(packs)), dtype=torch.int64)
    rows_in = torch.tensor([len(pack) for pack in packs], dtype=torch.int64)
    row_pack = torch.arange(len(packs)).repeat_interleave(rows_in)
    row_ends = torch.arange(len(rows))
    prompts = None
    sources, firsts, pack_of = rows, torch.zeros_like(rows), row_pack
    lengths = sequences.lengths[rows]
    if groups is not None:
        row_ends, prompts = _shared_prompts(groups[rows], row_pack)
        sources, firsts, lengths, pack_of = _parts(sequences, rows, row_pack, row_ends, prompts)

    padded = segments.padded(lengths)
    filled = torch.zeros_like(rows_in).index_add(0, pack_of, padded)
    whole_multiple = segments.pack_multiple(multiple)
    padding = torch.where(filled == 0, whole_multiple, -filled % whole_multiple)
    padding_before = padding.cumsum(0) - padding
    return _Layout(
        rows=rows,
        rows_in=rows_in,
        row_pack=row_pack,
        row_ends=row_ends,
        prompts=prompts,
        sources=sources,
        firsts=firsts,
        lengths=lengths,
        pack_of=pack_of,
        begins=padded.cumsum(0) - padded + padding_before[pack_of],
        padded=padded,
        parts_in=torch.bincount(pack_of, minlength=len(packs)),
        padding=padding,
        ends=(filled + padding).cumsum(0),
    )


def _shared_prompts(group: Tensor, row_pack: Tensor) -> tuple[Tensor, Tensor]:
    """The part that each row ends with, and that of its shared prompt (-1: none), [rows].

    Neighbours in a pack that are of one group share their prompt, which is a part before theirs.
    """
    begins = torch.ones(len(group), dtype=torch.bool)
    begins[1:] = (group[1:] != group[:-1]) | (row_pack[1:] != row_pack[:-1])
    tree = begins.cumsum(0) - 1
    members = torch.bincount(tree)
    is_shared = members > 1

    parts_in = members + is_shared
    first_part = parts_in.cumsum(0) - parts_in
    first_row = members.cumsum(0) - members
    number = torch.arange(len(group)) - first_row[tree]
    row_ends = first_part[tree] + is_shared[tree] + number
    return row_ends, torch.where(is_shared[tree], first_part[tree], -1)


def _parts(
    sequences: Sequences, rows: Tensor, row_pack: Tensor, row_ends: Tensor, prompts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sources`, `firsts`, `lengths` and `pack_of` of the parts of rows that share prompts."""
    is_shared = prompts >= 0
    prompt_lengths = sequences.prompt_lengths[rows]
    count = int(row_ends[-1]) + 1 if len(rows) else 0
    sources = torch.empty(count, dtype=torch.int64)
    firsts = torch.zeros(count, dtype=torch.int64)
    lengths = torch.empty(count, dtype=torch.int64)
    pack_of = torch.empty(count, dtype=torch.int64)

    # Members of a group have the same prompt, so it does not matter which of them writes last.
    places = prompts[is_shared]
    sources[places] = rows[is_shared]
    lengths[places] = prompt_lengths[is_shared]
    pack_of[places] = row_pack[is_shared]
    sources[row_ends] = rows
    firsts[row_ends] = torch.where(is_shared, prompt_lengths, 0)
    lengths[row_ends] = sequences.lengths[rows] - firsts[row_ends]
    pack_of[row_ends] = row_pack
    return sources, firsts, lengths, pack_of


def _token_ids(sequences: Sequences, laid: _Layout, segments: Segments) -> Tensor:
    """All tokens of all packs on this rank, int32, zeros where they are padded."""
    every = torch.arange(len(laid.lengths))
    ends = laid.firsts + laid.lengths
    positions, counts, places = laid.within(segments, every, laid.firsts, ends)
    begins = sequences.begins[laid.sources][:, None] + positions
    tokens = Parts(begins.flatten(), counts.flatten()).of(sequences.token_ids)
    total = int(laid.ends[-1]) // segments.size
    if len(tokens) == total:
        return tokens

    padded = torch.zeros(total, dtype=torch.int32)
    padded[Parts(places.flatten(), counts.flatten()).places] = tokens
    return padded


def _boundaries(laid: _Layout) -> tuple[Tensor, Tensor]:
    """The number of boundaries of each pack, [packs]; all of them, padding's too, int32."""
    is_padded = laid.padding > 0
    padding_begins = (laid.ends - laid.padding)[is_padded]
    begins = torch.cat([laid.begins, padding_begins])

    # Where a pack ends the next one begins; the stable order puts the end first.
    edges = torch.cat([laid.ends, begins]).sort(stable=True).values
    edges_in = laid.parts_in + is_padded + 1
    boundaries = edges - laid.pack_begins.repeat_interleave(edges_in)
    return edges_in, boundaries.to(torch.int32)


def _largest(laid: _Layout, of_parts: Tensor) -> Tensor:
    """The largest number of the parts of each pack, [packs]; 0 without parts."""
    zeros = torch.zeros_like(laid.parts_in)
    return zeros.scatter_reduce(0, laid.pack_of, of_parts, "amax")


def _trees(laid: _Layout, edges_in: Tensor, device: torch.device) -> Sequence[Trees | None]:
    """The trees of each pack; None for all if rows share no prompts."""
    if laid.prompts is None:
        return [None] * len(laid.parts_in)
    reach = torch.maximum(_largest(laid, laid.firsts + laid.padded), laid.padding).tolist()
    before = torch.zeros_like(laid.parts_in).index_add(0, laid.pack_of, laid.firsts).tolist()

    # The padding of a pack is its last part.
    parts_with_padding = edges_in - 1
    places = torch.arange(len(laid.firsts))
    places += (torch.nn.functional.pad((parts_with_padding - laid.parts_in), (1, 0)).cumsum(0))[
        laid.pack_of
    ]
    of_parts = torch.zeros((2, int(parts_with_padding.sum())), dtype=torch.int32)
    of_parts[:, places] = torch.stack([laid.firsts, laid.lengths]).int()

    first_part = (laid.parts_in.cumsum(0) - laid.parts_in)[laid.row_pack]
    none = parts_with_padding[laid.row_pack]
    prompts = torch.where(laid.prompts < 0, none, laid.prompts - first_part)
    of_rows = torch.stack([laid.row_ends - first_part, prompts]).int()

    split_parts = send(of_parts, device).split(parts_with_padding.tolist(), dim=1)
    rows_in = laid.rows_in.tolist()
    split_rows = send(of_rows, device).split(rows_in, dim=1)
    repeats = []
    for shared in laid.prompts.split(rows_in):
        numbers, times = shared[shared >= 0].unique(return_counts=True)
        tokens = laid.lengths[numbers].tolist()
        repeats.append(list(zip(tokens, (times - 1).tolist(), strict=True)))
    return [
        Trees(*of_parts, *of_rows, *of_pack)
        for of_parts, of_rows, *of_pack in zip(
            split_parts, split_rows, reach, before, repeats, strict=True
        )
    ]


def _selected(
    sequences: Sequences, laid: _Layout, segments: Segments, select: Select, device: torch.device
) -> dict[str, Sequence[Tensor]]:
    """The fields of each pack about its selected positions."""
    if select == "response":
        first = sequences.prompt_lengths[laid.rows] - 1
        end = sequences.lengths[laid.rows] - 1
    else:
        first = sequences.lengths[laid.rows] - 1
        end = sequences.lengths[laid.rows]

    columns = []
    counts = []
    for of_rank in segments.of_all_ranks:
        low, count, _ = _within_rows(laid, of_rank, first, end)
        columns.append(low - first[:, None])
        counts.append(count)

    low, count, begins = _within_rows(laid, segments, first, end)
    pack_begins = (laid.pack_begins // segments.size)[laid.row_pack]
    positions = Parts((begins - pack_begins[:, None]).flatten(), count.flatten()).places

    target_ids = torch.zeros(len(positions), dtype=torch.int32)
    if select == "response":
        next_begins = sequences.begins[laid.rows][:, None] + low + 1
        target_ids = Parts(next_begins.flatten(), count.flatten()).of(sequences.token_ids)

    count_in = torch.zeros_like(laid.rows_in).index_add(0, laid.row_pack, count.sum(dim=1)).tolist()
    rows_in = laid.rows_in.tolist()
    return {
        "select": send(positions.int(), device).split(count_in),
        "target_ids": send(target_ids, device).split(count_in),
        "columns": torch.stack(columns).split(rows_in, dim=1),
        "counts": torch.stack(counts).split(rows_in, dim=1),
    }


def _within_rows(
    laid: _Layout, segments: Segments, first: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`_Layout.within` of rows; segments of a shared prompt come before those of what follows."""
    whole = [(laid.row_ends, end)]
    if laid.prompts is not None:
        # Rows without a shared prompt take none of the positions from the first part.
        of_prompt = torch.where(laid.prompts < 0, first, end)
        whole.insert(0, (laid.prompts.clamp(min=0), of_prompt))

    found = [laid.within(segments, parts, first, last) for parts, last in whole]
    lows, counts, begins = (torch.cat(columns, dim=1) for columns in zip(*found, strict=True))
    return lows, counts, begins
