"""The facts about a pack that a model's layers ask for, made once for all of them.

The layers of megatron-core and TransformerEngine read the fields of `PackedSeqParams`; ours also
ask for the angles by which each token is rotated, and for the keys that lie on other ranks. This
file knows no layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrlhf.device import send
from mrlhf.parallel.head_exchange import HeadExchange
from mrlhf.parallel.key_exchange import KeyExchange, places_of, seen_places
from mrlhf.parallel.masks import Packed
from mrlhf.parallel.pack_routing import PackRouting, PassRouting
from mrlhf.parallel.packs import Pack, Trees
from mrlhf.parallel.segments import WHOLE, Segments


@dataclass(frozen=True)
class Rotation:
    """The angles by which the tokens of a pack are rotated."""

    cosines: Tensor  # float32 [positions, rotary_dim / 2], up to the longest sequence
    sines: Tensor  # of the same angles
    position_ids: Tensor  # int64 [tokens]

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token, float32 [tokens, rotary_dim / 2] each."""
        return self.cosines[self.position_ids], self.sines[self.position_ids]


@dataclass
class PackedSequences(PackedSeqParams):
    """Sequences laid end to end, or the segments of them that this rank holds.

    `cu_seqlens_q` has the beginning of each sequence or segment, and `cu_seqlens_kv` that of the
    keys that it may see. The last query of each sees the last of its keys. Where rows share
    prompts, parts of sequences stand for sequences in this.
    """

    position_ids: Tensor = field(kw_only=True)  # int64 [tokens], from 0 in each sequence
    # int32 [rows], tokens of each whole sequence. Padding at its end does not count.
    lengths: Tensor = field(kw_only=True)
    trees: Trees | None = field(kw_only=True, default=None)
    segments: Segments = field(kw_only=True, default=WHOLE)
    # Lays out the keys that each may see; None where they are its own, in their place.
    keys: KeyExchange | None = field(kw_only=True, default=None)
    # Replays and records the experts of the tokens; None: the routers choose.
    routing: PackRouting | None = field(kw_only=True, default=None)
    # The keys that layers with an indexer chose, by the layer's number, for those that share them.
    chosen: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    # What layers take in this pass: each its input [tokens, 1, size], and some the keys and values
    # of an earlier layer, which are here by its number.
    layer_inputs: tuple[Tensor, ...] = field(init=False, repr=False, default=())
    lent: dict[int, tuple[Tensor, ...]] = field(init=False, repr=False, default_factory=dict)
    _rotations: dict[int, tuple[Tensor, Rotation]] = field(
        init=False, repr=False, default_factory=dict
    )

    @classmethod
    def of_pack(
        cls,
        pack: Pack,
        cp_group: dist.ProcessGroup | None = None,
        routing: PassRouting | None = None,
    ) -> PackedSequences:
        """The sequences of a pack, with its padding as a last one.

        `cp_group` are the ranks that share the sequences; None if this rank has them whole.
        """
        segments = pack.segments
        trees = pack.trees
        query_edges = key_edges = pack.boundaries
        longest_keys = pack.longest
        keys = None

        if segments.size > 1 or trees is not None:
            assert segments.size == 1 or (cp_group is not None and cp_group.size() == segments.size)
            lengths = pack.boundaries.diff() // segments.count
            held = torch.tensor(segments.held, dtype=torch.int32, device=lengths.device)
            query_edges = _edges(lengths.repeat_interleave(len(segments.held)))
            seen = lengths[:, None] * (held + 1)
            longest_keys = pack.longest // segments.count * (segments.held[-1] + 1)
            if trees is not None:
                seen = seen + trees.firsts[:, None]
                longest_keys = trees.reach
            key_edges = _edges(seen.flatten())
            tokens = len(pack.token_ids)
            places = seen_places(pack.boundaries, tokens, segments, trees)
            keys = KeyExchange(cp_group if segments.size > 1 else None, places, tokens)

        packed = cls(
            qkv_format="thd",
            cu_seqlens_q=query_edges,
            cu_seqlens_kv=key_edges,
            max_seqlen_q=pack.longest // segments.count,
            max_seqlen_kv=longest_keys,
            position_ids=pack.position_ids,
            lengths=send(pack.lengths, pack.boundaries.device),
            trees=trees,
            segments=segments,
            keys=keys,
        )
        if routing is not None:
            packed.routing = routing.of_pack(pack, packed.rows, packed.position_ids)
        return packed

    @cached_property
    def mask(self) -> Packed:
        """The keys that each token sees."""
        return Packed(
            self.cu_seqlens_q,
            self.cu_seqlens_kv,
            self.max_seqlen_q,
            self.max_seqlen_kv,
            self.keys,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest whole sequence, with padding; ranks that share it agree."""
        return self.max_seqlen_q * self.segments.count if self.trees is None else self.trees.reach

    @property
    def parts(self) -> int:
        """The number of parts, which is that of sequences where no prompts are shared."""
        return len(self.lengths) if self.trees is None else len(self.trees.firsts)

    @cached_property
    def part_lengths(self) -> list[int]:
        """Tokens of each part over all ranks, without padding behind it, and of the padding behind
        all; on a GPU it waits.
        """
        padded = self._part_edges.diff()
        known = self.lengths if self.trees is None else self.trees.lengths
        own = torch.nn.functional.pad(known, (0, len(padded) - len(known)))
        return own.where(own > 0, padded).tolist()

    @property
    def _part_edges(self) -> Tensor:
        """Where each part begins over all ranks, and the end, int64 [parts + 1]."""
        return self.cu_seqlens_q[:: len(self.segments.held)].long() * self.segments.size

    @cached_property
    def heads(self) -> HeadExchange | None:
        """Brings the whole parts together, some heads to each rank; None where they are whole."""
        if self.segments.size == 1:
            return None
        assert self.keys is not None and self.keys.group is not None
        edges = self._part_edges
        lengths = torch.tensor(self.part_lengths)
        parts = send(torch.arange(len(lengths)).repeat_interleave(lengths), edges.device)
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        positions = send(torch.arange(len(begins)) - begins, edges.device)
        of_segments = edges.diff()[parts] // self.segments.count
        tokens = len(self.position_ids)
        places = places_of(positions, edges[parts], of_segments, tokens, self.segments)
        return HeadExchange(self.keys.group, places)

    @cached_property
    def parts_before(self) -> list[int]:
        """For each of `part_lengths`, the part that is its shared prompt, -1 for none."""
        before = [-1] * len(self.part_lengths)
        trees = self.trees
        if trees is not None:
            for end, prompt in zip(trees.ends.tolist(), trees.prompts.tolist(), strict=True):
                before[end] = prompt if prompt < len(before) else -1
        return before

    @cached_property
    def owners(self) -> Tensor:
        """The part that each token belongs to, int64 [tokens]; `parts` for padding."""
        edges = self.cu_seqlens_q.diff()
        numbers = torch.arange(len(edges), device=edges.device) // len(self.segments.held)
        tokens = len(self.position_ids)
        numbers = numbers.repeat_interleave(edges, output_size=tokens)

        if self.trees is None:
            ends = torch.nn.functional.pad(self.lengths, (0, 1))  # of a sequence of padding: 0
        else:
            ends = self.trees.firsts + self.trees.lengths
        return numbers.where(self.position_ids < ends[numbers], self.parts)

    @cached_property
    def rows(self) -> Tensor:
        """The row that each token belongs to, int64 [tokens]; the number of rows for padding.

        A shared prompt belongs to the first of its rows.
        """
        if self.trees is None:
            return self.owners
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        of_parts = rows.new_full((self.parts + 1,), len(rows))
        prompts = self.trees.prompts.long()
        of_parts.scatter_reduce_(0, prompts, rows, "amin")
        of_parts[self.trees.ends.long()] = rows
        of_parts[self.parts] = len(rows)
        return of_parts[self.owners]

    def rows_of(self, of_parts: Tensor) -> Tensor:
        """Sums over the parts of each row, [rows, ...], of numbers of parts, [parts + 1, ...]."""
        # The last number is that of padding, and is 0 where rows have no shared prompt.
        if self.trees is None:
            return of_parts[:-1]
        return of_parts[self.trees.ends.long()] + of_parts[self.trees.prompts.long()]

    def parts_of(self, of_rows: Tensor) -> Tensor:
        """Sums over the rows that have each part, [parts + 1, ...], of numbers of rows; see
        `rows_of`."""
        if self.trees is None:
            return torch.cat([of_rows, of_rows.new_zeros((1, *of_rows.shape[1:]))])
        sums = of_rows.new_zeros((self.parts + 1, *of_rows.shape[1:]))
        sums.index_add_(0, self.trees.ends.long(), of_rows)
        sums.index_add_(0, self.trees.prompts.long(), of_rows)
        sums[-1] = 0
        return sums

    def rotation(self, frequencies: Tensor, scale: float) -> Rotation:
        """The angles by which a layer rotates the tokens; `scale` multiplies cosines and sines.

        `frequencies` are the radians by which a step of one position rotates. Layers that rotate
        alike pass the same tensor, and get the result of the first of them.
        """
        if id(frequencies) not in self._rotations:
            device = self.position_ids.device
            positions = torch.arange(self.max_seqlen_kv, dtype=torch.float32, device=device)
            angles = torch.outer(positions, send(frequencies, device))
            rotation = Rotation(angles.cos() * scale, angles.sin() * scale, self.position_ids)
            # The tensor is kept, so that no other can come to have its id.
            self._rotations[id(frequencies)] = (frequencies, rotation)
        return self._rotations[id(frequencies)][1]


def _edges(lengths: Tensor) -> Tensor:
    """The beginning of each part of these lengths, and the end; int32 [parts + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
