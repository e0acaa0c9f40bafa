"""What a model's layers need to know of a pack, made once for all of them.

The layers of megatron-core and TransformerEngine read the fields of `PackedSeqParams`; ours also
ask for the angles by which each token is rotated. This file knows no layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrlhf.parallel.packs import Pack

Rotation = tuple[Tensor, Tensor]


@dataclass
class PackedSequences(PackedSeqParams):
    """Sequences laid end to end.

    Attributes:
        position_ids: int64 [tokens], from 0 in each sequence.
        sequences: how many there are, without padding, which stands behind them.
    """

    position_ids: Tensor = field(kw_only=True)
    sequences: int = field(kw_only=True)
    _rotations: dict[int, tuple[Tensor, Rotation]] = field(
        init=False, repr=False, default_factory=dict
    )

    @classmethod
    def of_pack(cls, pack: Pack) -> PackedSequences:
        """The sequences of a pack, with its padding as a last one."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=pack.boundaries,
            cu_seqlens_kv=pack.boundaries,
            max_seqlen_q=pack.longest,
            max_seqlen_kv=pack.longest,
            position_ids=pack.position_ids,
            sequences=len(pack.rows),
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; on a GPU the first call waits for the device."""
        lengths: list[int] = self.cu_seqlens_q.diff().tolist()
        return lengths

    @cached_property
    def owners(self) -> Tensor:
        """The sequence that each token belongs to, int64 [tokens]; `sequences` for padding."""
        lengths = self.cu_seqlens_q.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        tokens = len(self.position_ids)
        return numbers.repeat_interleave(lengths, output_size=tokens).clamp(max=self.sequences)

    @cached_property
    def sequence_lengths(self) -> Tensor:
        """Tokens of each sequence, float32 [sequences]."""
        return self.cu_seqlens_q.diff()[: self.sequences].float()

    def rotation(self, frequencies: Tensor, scale: float) -> Rotation:
        """Cosines and sines of each token, float32 [tokens, len(frequencies)] each.

        Args:
            frequencies: radians by which a step of one position rotates. Layers that rotate alike
                pass the same tensor, and get what the first of them got.
            scale: cosines and sines are multiplied by it.
        """
        if id(frequencies) not in self._rotations:
            device = self.position_ids.device
            positions = torch.arange(self.max_seqlen_q, dtype=torch.float32, device=device)
            angles = torch.outer(positions, frequencies.to(device))
            cosines = (angles.cos() * scale)[self.position_ids]
            sines = (angles.sin() * scale)[self.position_ids]
            # The tensor is kept, so that no other can come to have its id.
            self._rotations[id(frequencies)] = (frequencies, (cosines, sines))
        return self._rotations[id(frequencies)][1]
