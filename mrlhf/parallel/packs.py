"""Lays sequences end to end as packs, the micro-batches of a pipeline.

All packs of a rank's share are made together by a few operations on flat tensors, and each pack
is a view of the result. With context parallelism a rank's pack has its segments of each sequence,
and what it needs to know of the segments of the others. This file does not know which rows stand in
which pack, nor why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.parallel.segments import WHOLE, Segments
from mrlhf.parts import Parts

Select = Literal["response", "last"]


@dataclass(frozen=True)
class Pack:
    """Sequences laid end to end, as one micro-batch of a pipeline.

    With context parallelism the tokens and the selected positions are those of the segments that
    this rank holds: for each sequence one segment after the other, sequence by sequence.

    Every rank keeps its packs for the whole step, so a pack holds as little as it can, in int32;
    the properties are made anew each time, in int64.

    Attributes:
        rows: rows of the batch that are in the pack, in order.
        token_ids: int32 [tokens], where the model is.
        boundaries: int32 [sequences + 1], where each whole sequence begins with its padding, and
            the end, over all ranks that share the sequences; where the model is.
        lengths: int32 [rows], tokens of each whole sequence without its padding; where the model
            is.
        longest: tokens of the longest whole sequence, with padding.
        select: int32 [selected], the positions whose output is wanted; where the model is.
        target_ids: int32 [selected], the token that follows each of them in its sequence, on
            whichever rank; 0 if the last tokens are selected. Where the model is.
        columns: int64 [ranks, rows, held], the first column of each held segment's numbers in
            their row of a table; of all ranks that share the sequences, on the host.
        counts: int64 [ranks, rows, held], how many positions of each held segment are selected; on
            the host.
        width: columns of a table that holds a number for each selected position; those of a row
            stand in its first columns.
        segments: those that this rank holds.
    """

    rows: list[int]
    token_ids: Tensor
    boundaries: Tensor
    lengths: Tensor
    longest: int
    select: Tensor
    target_ids: Tensor
    columns: Tensor
    counts: Tensor
    width: int
    segments: Segments

    @property
    def position_ids(self) -> Tensor:
        """The position of each token, from 0 in each sequence, [tokens]; where the model is."""
        tokens = len(self.token_ids)
        device = self.boundaries.device
        held = torch.tensor(self.segments.held, dtype=torch.int64, device=device)
        lengths = self.boundaries.diff().long() // self.segments.count
        positions = (lengths[:, None] * held).flatten()  # of the first token of each held segment
        lengths = lengths.repeat_interleave(len(held))
        shifts = positions - (lengths.cumsum(0) - lengths)
        shifts = shifts.repeat_interleave(lengths, output_size=tokens)
        return torch.arange(tokens, device=device) + shifts

    @property
    def targets(self) -> Tensor:
        """The token that follows each selected position, [selected]; where the model is.

        Only for packs that select responses: nothing follows the last token of a sequence.
        """
        return self.target_ids.long()

    @property
    def places(self) -> Tensor:
        """Where the selected positions' numbers stand in a flat [batch, width] table, [selected].

        That is row * width + column, on the host, where the tables of the whole batch are.
        """
        return self.parts.places

    @property
    def parts(self) -> Parts:
        """The parts of a flat [batch, width] table that `places` are made of."""
        return self._own_parts(self._row_begins, slice(None))

    @property
    def parts_of_rows(self) -> Parts:
        """As `parts`, with the selected positions of whole rows, whichever ranks hold them."""
        return Parts(self._row_begins, self.row_counts)

    @property
    def row_counts(self) -> Tensor:
        """How many positions of each row are selected, over all ranks that share it, [rows]."""
        return self.counts.sum(dim=(0, 2))

    @property
    def rank_counts(self) -> Tensor:
        """How many positions of each row are selected on each of these ranks, [ranks, rows]."""
        return self.counts.sum(dim=2)

    def places_among(self, rows: slice) -> Tensor:
        """Where this rank's numbers stand among those of whole rows, one row after the other.

        Args:
            rows: which of the pack's rows, counted from its first.
        """
        counts = self.row_counts[rows]
        return self._own_parts(counts.cumsum(0) - counts, rows).places

    @property
    def _row_begins(self) -> Tensor:
        """Where each row begins in a flat [batch, width] table, [rows]."""
        return torch.tensor(self.rows, dtype=torch.int64) * self.width

    def _own_parts(self, begins: Tensor, rows: slice) -> Parts:
        """Where this rank's numbers of some rows stand, if those of each row begin so."""
        columns = self.columns[self.segments.rank, rows]
        counts = self.counts[self.segments.rank, rows]
        return Parts((begins[:, None] + columns).flatten(), counts.flatten())


@dataclass(frozen=True)
class _Laid:
    """Where everything stands when all packs are laid end to end, over all ranks; int64.

    Attributes:
        rows: [rows], in the order of the packs.
        rows_in: [packs], how many each pack has.
        pack_of: [rows], the pack of each row.
        begins: [rows], where each row begins.
        lengths: [rows], tokens of each row.
        padded: [rows], tokens of each row with its own padding.
        padding: [packs], tokens after the last row of each pack.
        ends: [packs], where each pack ends, its padding included.
    """

    rows: Tensor
    rows_in: Tensor
    pack_of: Tensor
    begins: Tensor
    lengths: Tensor
    padded: Tensor
    padding: Tensor
    ends: Tensor

    @property
    def pack_begins(self) -> Tensor:
        """Where each pack begins, [packs]."""
        return torch.nn.functional.pad(self.ends[:-1], (1, 0))

    @property
    def tokens_in(self) -> Tensor:
        """Tokens of each pack, [packs]."""
        return self.ends - self.pack_begins


class _Held:
    """The segments of each row that one rank holds; int64.

    Attributes:
        sizes: [rows, 1], tokens of a segment, with padding.
        positions: [rows, held], the position of each segment's first token in its sequence.
        begins: [rows, held], where each segment begins, if the packs of this rank are laid end to
            end.
    """

    def __init__(self, laid: _Laid, segments: Segments) -> None:
        held = torch.tensor(segments.held, dtype=torch.int64)
        self.sizes = (laid.padded // segments.count)[:, None]
        self.positions = self.sizes * held
        numbers = torch.arange(len(held))
        self.begins = (laid.begins // segments.size)[:, None] + self.sizes * numbers

    def within(self, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Which positions from `first` up to `end`, [rows], each segment holds.

        Returns:
            The first of them and their number, [rows, held].
        """
        low = torch.maximum(self.positions, first[:, None])
        high = torch.minimum(self.positions + self.sizes, end[:, None])
        return low, (high - low).clamp(min=0)


@dataclass(frozen=True)
class _Selected:
    """The selected positions of all packs, one pack after the other.

    Attributes:
        count_in: int64 [packs], how many each pack has on this rank.
        columns: see `Pack`; of all packs.
        counts: see `Pack`; of all packs.
        positions: int32 [selected], counted from the beginning of their pack on this rank.
        target_ids: int32 [selected].
        width: see `Pack`.
    """

    count_in: Tensor
    columns: Tensor
    counts: Tensor
    positions: Tensor
    target_ids: Tensor
    width: int


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
        sequences: of the whole batch.
        packs: the rows of each pack. One without rows is all padding: other ranks have more packs.
        select: "response": for each response token the position before it (where its log-prob and
            value come from), in tables as wide as `sequences.width`; "last": each sequence's last
            token, in tables of one column.
        multiple: each pack's token count on this rank is padded to a multiple of this, as a last
            sequence of zeros.
        device: where the model is.
        segments: those that this rank holds. Each sequence is padded with zeros, so that its
            segments are equally long.
    """
    if not packs:
        return []
    laid = _lay(sequences, packs, segments, multiple)
    token_ids = _token_ids(sequences, laid, segments)
    selected = _select(sequences, laid, segments, select)

    edges_in, boundaries = _boundaries(laid)
    longest = torch.zeros_like(laid.rows_in).scatter_reduce(0, laid.pack_of, laid.padded, "amax")
    longest = torch.maximum(longest, laid.padding)

    tokens_in = (laid.tokens_in // segments.size).tolist()
    count_in = selected.count_in.tolist()
    rows_in = laid.rows_in.tolist()
    columns: dict[str, Sequence[Any]] = {
        "rows": packs,
        "token_ids": token_ids.to(device).split(tokens_in),
        "boundaries": boundaries.to(device).split(edges_in.tolist()),
        "lengths": laid.lengths.int().to(device).split(rows_in),
        "longest": longest.tolist(),
        "select": selected.positions.to(device).split(count_in),
        "target_ids": selected.target_ids.to(device).split(count_in),
        "columns": selected.columns.split(rows_in, dim=1),
        "counts": selected.counts.split(rows_in, dim=1),
    }
    return [
        Pack(**dict(zip(columns, fields, strict=True)), width=selected.width, segments=segments)
        for fields in zip(*columns.values(), strict=True)
    ]


def lay_flat(
    tables: Mapping[str, Tensor | None], packs: Sequence[Pack], whole_rows: bool = False
) -> list[dict[str, Any]]:
    """What tables of a batch, [batch, width], hold at the selected positions of each pack.

    Args:
        tables: on the host, by name; or None.
        packs: their rows are those of the tables.
        whole_rows: whether each rank gets the numbers of whole rows, and not only its own.

    Returns:
        For each pack the numbers of each table, [selected], where the model is; None for None.
    """
    if not packs:
        return []
    parts_of = [pack.parts_of_rows if whole_rows else pack.parts for pack in packs]
    parts = Parts.join(parts_of)
    device = packs[0].select.device
    sizes = [int(parts.counts.sum()) for parts in parts_of]

    columns: dict[str, Sequence[Tensor | None]] = {}
    for name, table in tables.items():
        if table is None:
            columns[name] = [None] * len(packs)
        else:
            columns[name] = parts.of(table.reshape(-1)).to(device).split(sizes)
    return [
        dict(zip(columns, fields, strict=True)) for fields in zip(*columns.values(), strict=True)
    ]


def lay_in_rows(flat: Tensor, counts: Tensor, width: int) -> Tensor:
    """A table of [rows, width] with the numbers of each row in its first columns, 0 elsewhere.

    Args:
        flat: [numbers], those of one row after the other.
        counts: int64 [rows], how many each row has; on the host.
        width: columns of the table.
    """
    rows = len(counts)
    places = Parts(torch.arange(rows) * width, counts).places.to(flat.device)
    return flat.new_zeros(rows * width).index_copy(0, places, flat).view(rows, width)


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
    """How many boundaries each pack has, [packs]; all boundaries, int32.

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


def _select(sequences: Sequences, laid: _Laid, segments: Segments, select: Select) -> _Selected:
    if select == "response":
        first = sequences.prompt_lengths[laid.rows] - 1
        width = sequences.width
    else:
        first = laid.lengths - 1
        width = 1
    end = laid.lengths - 1 if select == "response" else laid.lengths

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
    count_in = torch.zeros_like(laid.rows_in).index_add(0, laid.pack_of, count.sum(dim=1))

    target_ids = torch.zeros(len(positions), dtype=torch.int32)
    if select == "response":
        next_begins = sequences.begins[laid.rows][:, None] + low + 1
        target_ids = Parts(next_begins.flatten(), count.flatten()).of(sequences.token_ids)
    return _Selected(
        count_in, torch.stack(columns), torch.stack(counts), positions.int(), target_ids, width
    )
