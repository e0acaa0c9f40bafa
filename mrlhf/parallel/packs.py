"""Lays sequences end to end as packs, the micro-batches of a pipeline.

All packs of a rank's share are made together by a few operations on flat tensors, and each pack
is a view of the result. This file does not know which rows stand in which pack, nor why.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    Its tensors are where the model is, but for `places`, which is on the host as the tables of the
    whole batch are.

    Attributes:
        rows: rows of the batch that are in the pack, in order.
        token_ids: int64 [tokens].
        position_ids: int64 [tokens], from 0 in each sequence.
        boundaries: int32 [sequences + 1], where each sequence begins, and the end.
        longest: tokens of the longest sequence.
        select: int64 [selected], the positions whose output is wanted.
        targets: int64 [selected], the token that follows each selected position (0 after the last
            token).
        places: int64 [selected], where the number of each selected position stands in a flat
            [batch, width] table: row * width + column.
        own_places: int64 [selected], the same for a table of the pack's rows alone.
        width: columns of these tables.
    """

    rows: list[int]
    token_ids: Tensor
    position_ids: Tensor
    boundaries: Tensor
    longest: int
    select: Tensor
    targets: Tensor
    places: Tensor
    own_places: Tensor
    width: int

    def spread(self, flat: Tensor) -> Tensor:
        """Lay [channels, selected] out as [channels, rows of the pack, width], 0 elsewhere."""
        channels = len(flat)
        table = flat.new_zeros(channels, len(self.rows) * self.width)
        return table.index_copy(1, self.own_places, flat).view(channels, -1, self.width)


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
    """The selected positions of all packs, one pack after the other; int64.

    Attributes:
        count_in: [packs], how many each pack has.
        positions: [selected], counted from the beginning of their pack.
        targets: [selected].
        places: [selected].
        own_places: [selected].
        width: see `Pack`.
    """

    count_in: Tensor
    positions: Tensor
    targets: Tensor
    places: Tensor
    own_places: Tensor
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
        packs: the rows of each pack; none is empty.
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

    edges_in, boundaries, position_ids = _boundaries(laid)
    longest = torch.zeros_like(laid.rows_in).scatter_reduce(0, laid.pack_of, laid.lengths, "amax")
    longest = torch.maximum(longest, laid.padding)

    tokens_in = laid.tokens_in.tolist()
    count_in = selected.count_in.tolist()
    columns: dict[str, Sequence[Any]] = {
        "rows": packs,
        "token_ids": token_ids.to(device).split(tokens_in),
        "position_ids": position_ids.to(device).split(tokens_in),
        "boundaries": boundaries.to(device).split(edges_in.tolist()),
        "longest": longest.tolist(),
        "select": selected.positions.to(device).split(count_in),
        "targets": selected.targets.to(device).split(count_in),
        "places": selected.places.split(count_in),
        "own_places": selected.own_places.to(device).split(count_in),
    }
    return [
        Pack(**dict(zip(columns, fields, strict=True)), width=selected.width)
        for fields in zip(*columns.values(), strict=True)
    ]


def _lay(sequences: Sequences, packs: Sequence[list[int]], multiple: int) -> _Laid:
    rows = torch.tensor(list(chain.from_iterable(packs)), dtype=torch.int64)
    rows_in = torch.tensor([len(pack) for pack in packs], dtype=torch.int64)
    pack_of = torch.arange(len(packs)).repeat_interleave(rows_in)

    lengths = sequences.lengths[rows]
    filled = torch.zeros_like(rows_in).index_add(0, pack_of, lengths)
    padding = -filled % multiple
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
    """All tokens of all packs, zeros where they are padded."""
    places = ranges(sequences.begins[laid.rows], laid.lengths)
    tokens = _taken(sequences.token_ids, places).long()
    if not laid.padding.any():
        return tokens

    padded = torch.zeros(int(laid.ends[-1]), dtype=torch.int64)
    padded[ranges(laid.begins, laid.lengths)] = tokens
    return padded


def _boundaries(laid: _Laid) -> tuple[Tensor, Tensor, Tensor]:
    """How many boundaries each pack has, [packs]; all boundaries; all position ids.

    Padding is a sequence too.
    """
    padded = laid.padding > 0
    padding_begins = (laid.ends - laid.padding)[padded]
    begins = torch.cat([laid.begins, padding_begins]).sort().values
    sizes = torch.diff(begins, append=laid.ends[-1:])
    position_ids = ranges(torch.zeros_like(sizes), sizes)

    # Where a pack ends the next one begins; the stable order puts the end first.
    edges = torch.cat([laid.ends, begins]).sort(stable=True).values
    edges_in = laid.rows_in + padded + 1
    boundaries = edges - laid.pack_begins.repeat_interleave(edges_in)
    return edges_in, boundaries.to(torch.int32), position_ids


def _select(sequences: Sequences, laid: _Laid, select: Select) -> _Selected:
    begins = laid.begins - laid.pack_begins[laid.pack_of]
    if select == "response":
        prompts = sequences.prompt_lengths[laid.rows]
        width = sequences.width
        counts = laid.lengths - prompts
        positions = ranges(begins + prompts - 1, counts)
        following = ranges(sequences.begins[laid.rows] + prompts, counts)
        targets = _taken(sequences.token_ids, following).long()
    else:
        width = 1
        counts = torch.ones_like(laid.lengths)
        positions = begins + laid.lengths - 1
        targets = torch.zeros_like(positions)

    count_in = torch.zeros_like(laid.rows_in).index_add(0, laid.pack_of, counts)
    first_rows = laid.rows_in.cumsum(0) - laid.rows_in
    own_rows = torch.arange(len(laid.rows)) - first_rows[laid.pack_of]
    return _Selected(
        count_in=count_in,
        positions=positions,
        targets=targets,
        places=ranges(laid.rows * width, counts),
        own_places=ranges(own_rows * width, counts),
        width=width,
    )


def _taken(flat: Tensor, places: Tensor) -> Tensor:
    """The entries at `places`; NumPy takes them several times as fast as torch does."""
    return torch.from_numpy(flat.numpy()[places.numpy()])
