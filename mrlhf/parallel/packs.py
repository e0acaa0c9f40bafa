"""Lays sequences end to end as packs, the micro-batches of a pipeline.

All packs of a rank's share are made together by a few operations on flat tensors, and each pack
is a view of the result. This file does not know which rows stand in which pack, nor why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from mrlhf.batch import Sequences, ranges

Select = Literal["response", "last"]


@dataclass(frozen=True)
class Pack:
    """Sequences laid end to end, as one micro-batch of a pipeline.

    Every rank keeps its packs for the whole step, so a pack holds as little as it can, in int32;
    the properties are made anew each time, in int64.

    Attributes:
        rows: rows of the batch that are in the pack, in order.
        token_ids: int32 [tokens], where the model is.
        boundaries: int32 [sequences + 1], where each sequence begins, and the end; where the model
            is.
        longest: tokens of the longest sequence.
        select: int32 [selected], the positions whose output is wanted; where the model is.
        counts: int64 [rows], how many positions of each row are selected; on the host.
        width: columns of a table that holds a number for each selected position; those of a row
            stand in its first columns.
    """

    rows: list[int]
    token_ids: Tensor
    boundaries: Tensor
    longest: int
    select: Tensor
    counts: Tensor
    width: int

    @property
    def position_ids(self) -> Tensor:
        """The position of each token, from 0 in each sequence, [tokens]; where the model is."""
        tokens = len(self.token_ids)
        begins = self.boundaries[:-1].repeat_interleave(self.boundaries.diff(), output_size=tokens)
        return torch.arange(tokens, device=begins.device) - begins

    @property
    def targets(self) -> Tensor:
        """The token that follows each selected position, [selected]; where the model is.

        Only for packs that select responses: nothing follows the last token of a sequence.
        """
        return self.token_ids[self.select.long() + 1].long()

    @property
    def places(self) -> Tensor:
        """Where the selected positions' numbers stand in a flat [batch, width] table, [selected].

        That is row * width + column, on the host, where the tables of the whole batch are.
        """
        return ranges(torch.tensor(self.rows, dtype=torch.int64) * self.width, self.counts)

    def counts_in(self, part: slice) -> Tensor:
        """How many of some selected positions each row has, [rows with any]; on the host.

        Args:
            part: which of the selected positions; those of whole rows.
        """
        ends = self.counts.cumsum(0)
        return self.counts[(ends > part.start) & (ends <= part.stop)]


@dataclass(frozen=True)
class _Laid:
    """Where everything stands when all packs are laid end to end; int64.

    Attributes:
        rows: [rows], in the order of the packs.
        rows_in: [packs], how many each pack has.
        pack_of: [rows], the pack of each row.
        begins: [rows], where each row begins.
        lengths: [rows], tokens of each row.
        padding: [packs], tokens after the last row of each pack.
        ends: [packs], where each pack ends, its padding included.
    """

    rows: Tensor
    rows_in: Tensor
    pack_of: Tensor
    begins: Tensor
    lengths: Tensor
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


@dataclass(frozen=True)
class _Selected:
    """The selected positions of all packs, one pack after the other.

    Attributes:
        count_in: int64 [packs], how many each pack has.
        counts: int64 [rows], how many each row has.
        positions: int32 [selected], counted from the beginning of their pack.
        width: see `Pack`.
    """

    count_in: Tensor
    counts: Tensor
    positions: Tensor
    width: int


def make_packs(
    sequences: Sequences,
    packs: Sequence[list[int]],
    select: Select,
    multiple: int,
    device: torch.device,
) -> list[Pack]:
    """Lay sequences end to end, and move the packs to `device`.

    Args:
        sequences: of the whole batch.
        packs: the rows of each pack. One without rows is all padding: other ranks have more packs.
        select: "response": for each response token the position before it (where its log-prob and
            value come from), in tables as wide as `sequences.width`; "last": each sequence's last
            token, in tables of one column.
        multiple: each pack's token count is padded to a multiple of this, as a last sequence of
            zeros.
        device: where the model is.
    """
    if not packs:
        return []
    laid = _lay(sequences, packs, multiple)
    token_ids = _token_ids(sequences, laid)
    selected = _select(sequences, laid, select)

    edges_in, boundaries = _boundaries(laid)
    longest = torch.zeros_like(laid.rows_in).scatter_reduce(0, laid.pack_of, laid.lengths, "amax")
    longest = torch.maximum(longest, laid.padding)

    tokens_in = laid.tokens_in.tolist()
    count_in = selected.count_in.tolist()
    columns: dict[str, Sequence[Any]] = {
        "rows": packs,
        "token_ids": token_ids.to(device).split(tokens_in),
        "boundaries": boundaries.to(device).split(edges_in.tolist()),
        "longest": longest.tolist(),
        "select": selected.positions.to(device).split(count_in),
        "counts": selected.counts.split(laid.rows_in.tolist()),
    }
    return [
        Pack(**dict(zip(columns, fields, strict=True)), width=selected.width)
        for fields in zip(*columns.values(), strict=True)
    ]


def lay_flat(tables: Mapping[str, Tensor | None], packs: Sequence[Pack]) -> list[dict[str, Any]]:
    """What tables of a batch, [batch, width], hold at the selected positions of each pack.

    Args:
        tables: on the host, by name; or None.
        packs: their rows are those of the tables.

    Returns:
        For each pack the numbers of each table, [selected], where the model is; None for None.
    """
    if not packs:
        return []
    places = torch.cat([pack.places for pack in packs])
    device = packs[0].select.device
    sizes = [len(pack.select) for pack in packs]

    columns: dict[str, Sequence[Tensor | None]] = {}
    for name, table in tables.items():
        if table is None:
            columns[name] = [None] * len(packs)
        else:
            columns[name] = table.reshape(-1)[places].to(device).split(sizes)
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
    places = ranges(torch.arange(rows) * width, counts).to(flat.device)
    return flat.new_zeros(rows * width).index_copy(0, places, flat).view(rows, width)


def _lay(sequences: Sequences, packs: Sequence[list[int]], multiple: int) -> _Laid:
    rows = torch.tensor(list(chain.from_iterable(packs)), dtype=torch.int64)
    rows_in = torch.tensor([len(pack) for pack in packs], dtype=torch.int64)
    pack_of = torch.arange(len(packs)).repeat_interleave(rows_in)

    lengths = sequences.lengths[rows]
    filled = torch.zeros_like(rows_in).index_add(0, pack_of, lengths)
    # A pack without rows is all padding.
    padding = torch.where(filled == 0, multiple, -filled % multiple)
    padding_before = padding.cumsum(0) - padding
    return _Laid(
        rows=rows,
        rows_in=rows_in,
        pack_of=pack_of,
        begins=lengths.cumsum(0) - lengths + padding_before[pack_of],
        lengths=lengths,
        padding=padding,
        ends=(filled + padding).cumsum(0),
    )


def _token_ids(sequences: Sequences, laid: _Laid) -> Tensor:
    """All tokens of all packs, int32, zeros where they are padded."""
    places = ranges(sequences.begins[laid.rows], laid.lengths)
    # NumPy takes them several times as fast as torch does.
    tokens = torch.from_numpy(sequences.token_ids.numpy()[places.numpy()])
    if not laid.padding.any():
        return tokens

    padded = torch.zeros(int(laid.ends[-1]), dtype=torch.int32)
    padded[ranges(laid.begins, laid.lengths)] = tokens
    return padded


def _boundaries(laid: _Laid) -> tuple[Tensor, Tensor]:
    """How many boundaries each pack has, [packs]; all boundaries, int32.

    Padding is a sequence too.
    """
    padded = laid.padding > 0
    padding_begins = (laid.ends - laid.padding)[padded]
    begins = torch.cat([laid.begins, padding_begins])

    # Where a pack ends the next one begins; the stable order puts the end first.
    edges = torch.cat([laid.ends, begins]).sort(stable=True).values
    edges_in = laid.rows_in + padded + 1
    boundaries = edges - laid.pack_begins.repeat_interleave(edges_in)
    return edges_in, boundaries.to(torch.int32)


def _select(sequences: Sequences, laid: _Laid, select: Select) -> _Selected:
    begins = laid.begins - laid.pack_begins[laid.pack_of]
    if select == "response":
        prompts = sequences.prompt_lengths[laid.rows]
        width = sequences.width
        counts = laid.lengths - prompts
        positions = ranges(begins + prompts - 1, counts)
    else:
        width = 1
        counts = torch.ones_like(laid.lengths)
        positions = begins + laid.lengths - 1

    count_in = torch.zeros_like(laid.rows_in).index_add(0, laid.pack_of, counts)
    return _Selected(count_in, counts, positions.int(), width)
