"""The pass that attention and delta nets have in common: project, mix the tokens, project back."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from torch import Tensor

from mrlhf.parallel.packed_sequences import PackedSequences


class TokenMixing:
    """A module's forward pass for packed sequences, with the interface of megatron-core's.

    Attributes:
        recomputes: whether the backward pass computes `mix` again.
        linear_proj: the output's projection.
    """

    recomputes: bool
    linear_proj: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix within the sequences of a pack; the mask is causal.

        `hidden_states` is [tokens, 1, hidden], or this rank's part of them under sequence
        parallelism.

        Returns:
            The output, shaped as `hidden_states`, and a bias, as SelfAttention returns them.
        """
        assert attention_mask is None

        def mix(*projections: Tensor) -> Tensor:
            return self.mix(projections, packed_seq_params)

        projections = self.project(hidden_states, packed_seq_params)
        if self.recomputes and torch.is_grad_enabled():
            output = checkpoint(mix, False, *projections)
        else:
            output = mix(*projections)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(output.unsqueeze(1))
        return projected

    def project(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, ...]:
        """Return what `mix` takes, of this rank's heads."""
        raise NotImplementedError

    def mix(self, projections: tuple[Tensor, ...], packed: PackedSequences) -> Tensor:
        """Return [tokens, heads * size of an output], of this rank's heads."""
        raise NotImplementedError
