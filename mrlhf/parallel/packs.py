"""A pack, the micro-batch of a pipeline, and the entries of a batch's tables at its positions.

It does not know how packs are made, nor which rows stand in which pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.device import send
from mrlhf.parallel.segments import Segments
from mrlhf.records import Parts, SamplingMasks


@dataclass(frozen=True)
class Trees:
    """How the parts of a pack make sequences, where rows share their prompts.

    A part is a prompt that several rows share, what follows it in one of them, a whole row, or the
    padding at the end; a prompt stands before all that follow it. Tensors are int32 and where the
    model is.
    """

    firsts: Tensor  # [parts], the position of each part's first token in its sequence
    lengths: Tensor  # [parts], tokens of each part, unpadded; 0 for padding
    ends: Tensor  # [rows], the part that each row ends with
    prompts: Tensor  # [rows], the part of each row's shared prompt; the number of parts: none
    reach: int  # tokens of the longest sequence, with the padding at its end
    before: int  # the sum of `firsts`
    repeats: list[tuple[int, int]]  # tokens of each shared prompt, and rows that need no other


@dataclass(frozen=True)
class Pack:
    """Sequences laid end to end, as one micro-batch of a pipeline.

    With context parallelism the tokens and the selected positions are those of the segments that
    this rank holds: for each sequence one segment after the other, sequence by sequence. Where rows
    share prompts, the parts of `trees` stand for the sequences in this.

    Every rank keeps its packs for the whole step, so a pack holds as little as it can, in int32;
    the properties are made anew each time, in int64. Tensors are where the model is, except
    `firsts`, `columns`, `counts` and `masks`, which are on the host.
    """

    rows: list[int]  # the row of the batch of each sequence in the pack, in order
    firsts: Tensor  # int64 [rows], the column of the first number of each in its row of a table
    token_ids: Tensor  # int32 [tokens]
    # int32 [sequences + 1], the beginning of each whole sequence, or part, with its padding, and
    # the end, over all ranks that share the sequences.
    boundaries: Tensor
    lengths: Tensor  # int32 [rows], tokens of each whole sequence, unpadded; on the host
    longest: int  # tokens of the longest whole sequence, or part, with padding
    select: Tensor  # int32 [selected], the positions whose output is wanted
    # int32 [selected], the token that follows each of them in its sequence, on whichever rank; 0 if
    # the last tokens are selected.
    target_ids: Tensor
    # int64 [ranks, rows, held], the first of each held segment's numbers, counted from the first of
    # the sequence; of all ranks that share the sequences. With `trees` the segments of a row are
    # those of its prompt and then those of its last part.
    columns: Tensor
    counts: Tensor  # int64 [ranks, rows, held], selected positions of each held segment
    width: int  # columns of a table that holds a number for each selected position
    segments: Segments  # those that this rank holds
    trees: Trees | None = None  # if rows may share prompts
    # Of the selected positions, a row each, on the host; None: any token could be drawn.
    masks: SamplingMasks | None = None

    @property
    def position_ids(self) -> Tensor:
        """The position of each token, from 0 in each sequence, [tokens]; where the model is."""
        tokens = len(self.token_ids)
        device = self.boundaries.device
        held = send(torch.tensor(self.segments.held, dtype=torch.int64), device)
        lengths = self.boundaries.diff().long() // self.segments.count
        positions = lengths[:, None] * held  # of the first token of each held segment
        if self.trees is not None:
            positions += self.trees.firsts[:, None]
        positions = positions.flatten()
        lengths = lengths.repeat_interleave(len(held))
        shifts = positions - (lengths.cumsum(0) - lengths)
        shifts = shifts.repeat_interleave(lengths, output_size=tokens)
        return torch.arange(tokens, device=device) + shifts

    @property
    def targets(self) -> Tensor:
        """The token that follows each selected position of a response, [selected]."""
        return self.target_ids.long()

    @property
    def places(self) -> Tensor:
        """The places of the selected numbers in a flat [batch, width] table, on the host."""
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
    def begun_rows(self) -> int:
        """How many rows of the batch have their first sequence in this pack."""
        return int((self.firsts == 0).sum())

    @property
    def row_counts(self) -> Tensor:
        """The number of selected positions of each row, over all ranks that share it, [rows]."""
        return self.counts.sum(dim=(0, 2))

    @property
    def rank_counts(self) -> Tensor:
        """The number of selected positions of each row on each of these ranks, [ranks, rows]."""
        return self.counts.sum(dim=2)

    def places_among(self, rows: slice) -> Tensor:
        """This rank's places among those of whole `rows`, which count from the pack's first."""
        counts = self.row_counts[rows]
        return self._own_parts(counts.cumsum(0) - counts, rows).places

    @property
    def _row_begins(self) -> Tensor:
        """Where the numbers of each sequence begin in a flat [batch, width] table, [rows]."""
        return torch.tensor(self.rows, dtype=torch.int64) * self.width + self.firsts

    def _own_parts(self, begins: Tensor, rows: slice) -> Parts:
        """The places of this rank's numbers of some rows, each of which begins at `begins`."""
        columns = self.columns[self.segments.rank, rows]
        counts = self.counts[self.segments.rank, rows]
        return Parts((begins[:, None] + columns).flatten(), counts.flatten())


def lay_flat(
    tables: Mapping[str, Tensor | None], packs: Sequence[Pack], whole_rows: bool = False
) -> list[dict[str, Any]]:
    """The entries of a batch's tables, [batch, width], at the selected positions of each pack.

    The tables are on the host, the entries, [selected], where the model is. A table that is None
    gives None. With `whole_rows` each rank gets the numbers of whole rows, and not only its own.
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
            columns[name] = send(parts.of(table.reshape(-1)), device).split(sizes)
    return [
        dict(zip(columns, fields, strict=True)) for fields in zip(*columns.values(), strict=True)
    ]


def lay_in_rows(flat: Tensor, counts: Tensor, width: int) -> Tensor:
    """A table [rows, width] of the `flat` numbers of rows, `counts` of each, 0 elsewhere."""
    rows = len(counts)
    places = Parts(torch.arange(rows) * width, counts).places.to(flat.device)
    return flat.new_zeros(rows * width).index_copy(0, places, flat).view(rows, width)


def gather_rows(
    numbers: Tensor, pack: Pack, group: dist.ProcessGroup, rows: slice = slice(None)
) -> Tensor:
    """The numbers of all selected positions of whole rows, [channels, selected], row by row.

    For losses that need all numbers of a sequence at once: every rank of the group, which shares
    the sequences, evaluates the loss on the same numbers, and gradients reach its own alone.
    `numbers`, [channels, selected], are this rank's of `rows`, counted from the pack's first.
    """
    if pack.segments.size == 1:
        return numbers
    places = pack.places_among(rows).to(numbers.device)
    total = int(pack.row_counts[rows].sum())
    whole = numbers.new_zeros((len(numbers), total))
    with torch.no_grad():
        whole.index_copy_(1, places, numbers)
        # Each number is on one rank; the others add zeros.
        dist.all_reduce(whole, group=group)
    return whole.index_copy(1, places, numbers)
