"""Lays sequences end to end as packs.

All packs of a rank's share are made together by a few operations on flat tensors, and each pack
is a view of the result. With context parallelism a rank's pack has its segments of each sequence,
and what it needs to know of the segments of the others. This file does not know which rows stand in
which pack, nor why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from mrlhf.batch import Parts, Sequences
from mrlhf.device import send
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.segments import WHOLE, Segments

Select = Literal["response", "last"]


@dataclass(frozen=True)
class _Laid:
    """The places of everything when all packs are laid end to end, over all ranks; int64."""

    rows: Tensor  # [rows], in the order of the packs
    rows_in: Tensor  # [packs], the number of rows of each pack
    pack_of: Tensor  # [rows], the pack of each row
    begins: Tensor  # [rows], the beginning of each row
    lengths: Tensor  # [rows], tokens of each row
    padded: Tensor  # [rows], tokens of each row with its own padding
    padding: Tensor  # [packs], tokens after the last row of each pack
    ends: Tensor  # [packs], the end of each pack, its padding included

    @property
    def pack_begins(self) -> Tensor:
        """Where each pack begins, [packs]."""
        return torch.nn.functional.pad(self.ends[:-1], (1, 0))

    @property
    def tokens_in(self) -> Tensor:
        """Tokens of each pack, [packs]."""
        return self.ends - self.pack_begins


class _Held:
    """The segments of each row that one rank holds; int64."""

    def __init__(self, laid: _Laid, segments: Segments) -> None:
        held = torch.tensor(segments.held, dtype=torch.int64)
        # [rows, 1], tokens of a segment, with padding.
        self.sizes = (laid.padded // segments.count)[:, None]
        # [rows, held], the position of each segment's first token in its sequence.
        self.positions = self.sizes * held
        # [rows, held], the beginning of each segment, if this rank's packs are laid end to end.
        numbers = torch.arange(len(held))
        self.begins = (laid.begins // segments.size)[:, None] + self.sizes * numbers

    def within(self, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """The first position from `first` up to `end`, [rows], in each segment, and their number.

        Both are [rows, held].
        """
        low = torch.maximum(self.positions, first[:, None])
        high = torch.minimum(self.positions + self.sizes, end[:, None])
        return low, (high - low).clamp(min=0)


def make_packs(
    sequences: Sequences,
    packs: Sequence[list[int]],
    select: Select,
    multiple: int,
    device: torch.device,
    segments: Segments = WHOLE,
) -> list[Pack]:
    """Lay sequences end to end, and move the packs to `device`.

    Args:
        packs: the rows of each. One without rows is all padding: other ranks have more packs.
        select: "response": for each response token the position before it (where its log-prob and
            value come from), in tables as wide as `sequences.width`; "last": each sequence's last
            token, in tables of one column.
        multiple: each pack's token count on this rank is padded to a multiple of this, as a last
            sequence of zeros.
        segments: those that this rank holds. Each sequence is padded with zeros, so that its
            segments are equally long.
    """
    if not packs:
        return []
    laid = _lay(sequences, packs, segments, multiple)
    token_ids = _token_ids(sequences, laid, segments)

    edges_in, boundaries = _boundaries(laid)
    longest = torch.zeros_like(laid.rows_in).scatter_reduce(0, laid.pack_of, laid.padded, "amax")
    longest = torch.maximum(longest, laid.padding)

    tokens_in = (laid.tokens_in // segments.size).tolist()
    fields_of: dict[str, Sequence[Any]] = {
        "rows": packs,
        "token_ids": send(token_ids, device).split(tokens_in),
        "boundaries": send(boundaries, device).split(edges_in.tolist()),
        "lengths": laid.lengths.int().split(laid.rows_in.tolist()),
        "longest": longest.tolist(),
        **_selected(sequences, laid, segments, select, device),
    }
    width = sequences.width if select == "response" else 1
    return [
        Pack(**dict(zip(fields_of, fields, strict=True)), width=width, segments=segments)
        for fields in zip(*fields_of.values(), strict=True)
    ]


def _lay(
    sequences: Sequences, packs: Sequence[list[int]], segments: Segments, multiple: int
) -> _Laid:
    rows = torch.tensor(list(chain.from_iterable(packs)), dtype=torch.int64)
    rows_in = torch.tensor([len(pack) for pack in packs], dtype=torch.int64)
    pack_of = torch.arange(len(packs)).repeat_interleave(rows_in)

    lengths = sequences.lengths[rows]
    padded = segments.padded(lengths)
    filled = torch.zeros_like(rows_in).index_add(0, pack_of, padded)
    whole_multiple = segments.pack_multiple(multiple)
    padding = torch.where(filled == 0, whole_multiple, -filled % whole_multiple)
    padding_before = padding.cumsum(0) - padding
    return _Laid(
        rows=rows,
        rows_in=rows_in,
        pack_of=pack_of,
        begins=padded.cumsum(0) - padded + padding_before[pack_of],
        lengths=lengths,
        padded=padded,
        padding=padding,
        ends=(filled + padding).cumsum(0),
    )


def _token_ids(sequences: Sequences, laid: _Laid, segments: Segments) -> Tensor:
    """All tokens of all packs on this rank, int32, zeros where they are padded."""
    held = _Held(laid, segments)
    positions, counts = held.within(torch.zeros_like(laid.lengths), laid.lengths)
    begins = sequences.begins[laid.rows][:, None] + positions
    tokens = Parts(begins.flatten(), counts.flatten()).of(sequences.token_ids)
    total = int(laid.ends[-1]) // segments.size
    if len(tokens) == total:
        return tokens

    padded = torch.zeros(total, dtype=torch.int32)
    padded[Parts(held.begins.flatten(), counts.flatten()).places] = tokens
    return padded


def _boundaries(laid: _Laid) -> tuple[Tensor, Tensor]:
    """The number of boundaries of each pack, [packs]; all boundaries, int32.

    Padding after the last row is a sequence too.
    """
    is_padded = laid.padding > 0
    padding_begins = (laid.ends - laid.padding)[is_padded]
    begins = torch.cat([laid.begins, padding_begins])

    # Where a pack ends the next one begins; the stable order puts the end first.
    edges = torch.cat([laid.ends, begins]).sort(stable=True).values
    edges_in = laid.rows_in + is_padded + 1
    boundaries = edges - laid.pack_begins.repeat_interleave(edges_in)
    return edges_in, boundaries.to(torch.int32)


def _selected(
    sequences: Sequences, laid: _Laid, segments: Segments, select: Select, device: torch.device
) -> dict[str, Sequence[Tensor]]:
    """The fields of each pack about its selected positions."""
    if select == "response":
        first = sequences.prompt_lengths[laid.rows] - 1
        end = laid.lengths - 1
    else:
        first = laid.lengths - 1
        end = laid.lengths

    columns = []
    counts = []
    for of_rank in segments.of_all_ranks:
        low, count = _Held(laid, of_rank).within(first, end)
        columns.append(low - first[:, None])
        counts.append(count)

    held = _Held(laid, segments)
    low, count = held.within(first, end)
    pack_begins = (laid.pack_begins // segments.size)[laid.pack_of]
    begins = held.begins - pack_begins[:, None] + low - held.positions
    positions = Parts(begins.flatten(), count.flatten()).places

    target_ids = torch.zeros(len(positions), dtype=torch.int32)
    if select == "response":
        next_begins = sequences.begins[laid.rows][:, None] + low + 1
        target_ids = Parts(next_begins.flatten(), count.flatten()).of(sequences.token_ids)

    count_in = torch.zeros_like(laid.rows_in).index_add(0, laid.pack_of, count.sum(dim=1)).tolist()
    rows_in = laid.rows_in.tolist()
    return {
        "select": send(positions.int(), device).split(count_in),
        "target_ids": send(target_ids, device).split(count_in),
        "columns": torch.stack(columns).split(rows_in, dim=1),
        "counts": torch.stack(counts).split(rows_in, dim=1),
    }
