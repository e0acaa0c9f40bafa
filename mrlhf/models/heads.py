"""The heads of a model's last stage, which do not give whole logits.

A language model gives the hidden states that its output layer is applied to; a value or reward
model gives one or a few numbers for each token. Only the head differs from megatron-core's
GPTModel. This file does not know losses, or what is done with hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class HiddenHead(torch.nn.Module):
    """Holds the weight of the output layer, and gives the hidden states of all tokens.

    They are [seq_len, micro_batch, hidden], the same on every tensor-parallel rank. Each rank
    computes with its own shard of the weight, so their gradient is summed over the ranks.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter | None,
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        """Take over the weight, which is None if it is the embedding's."""
        super().__init__()
        self.weight = weight
        self._sequence_parallel = config.sequence_parallel
        self._tp_group = tp_group

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Return the hidden states; megatron-core gives the output layer more arguments."""
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self._tp_group), None
        return copy_to_tensor_model_parallel_region(hidden, group=self._tp_group), None


class GPTHiddenModel(GPTModel):
    """A GPTModel whose last stage gives the hidden states, [micro_batch, seq_len, hidden]."""

    def __init__(self, *, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(config=config, **arguments)
        if self.post_process:
            weight = self.output_layer.weight
            assert weight is None or isinstance(weight, torch.nn.Parameter)
            self.output_layer: torch.nn.Module = HiddenHead(weight, config, self.pg_collection.tp)

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer, [vocab_shard, hidden]; only on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert isinstance(weight, Tensor)
        return weight


class ScalarHead(torch.nn.Module):
    """[seq_len, micro_batch, hidden] -> [seq_len, micro_batch, outputs], on every rank of tp.

    A new head is zero, so a model without a trained head predicts zero everywhere, in any layout.
    """

    def __init__(
        self, config: TransformerConfig, outputs: int, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(outputs, config.hidden_size, dtype=config.params_dtype)
        )
        # Under sequence parallelism each rank sees its own tokens, and megatron-core sums the
        # gradients of parameters with this mark over the group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._sequence_parallel = config.sequence_parallel
        self._tp_group = tp_group

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Return the scalars; megatron-core gives the output layer more arguments."""
        scalars = torch.nn.functional.linear(hidden, self.weight)
        if self._sequence_parallel:
            # Every rank computes the same loss, so the gradient is split and not summed.
            scalars = gather_from_sequence_parallel_region(
                scalars, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return scalars, None


class GPTScalarModel(GPTModel):
    """A GPTModel whose last stage ends in a ScalarHead: [micro_batch, seq_len, outputs]."""

    def __init__(
        self, *, config: TransformerConfig, vocab_size: int, outputs: int, **arguments: Any
    ) -> None:
        if arguments["post_process"] and not arguments["pre_process"]:
            # A last stage has no embedding. Make the output layer, which is replaced below, as
            # small as possible.
            vocab_size = config.tensor_model_parallel_size
        super().__init__(config=config, vocab_size=vocab_size, **arguments)
        if self.post_process:
            self.output_layer = ScalarHead(config, outputs, self.pg_collection.tp)
