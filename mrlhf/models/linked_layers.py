"""Layers that take more than the hidden states of the layer before: inputs of their own, and keys
and values of an earlier layer, as in Gemma 4 E2B.

What they take is kept with the pack while it passes through the model. This file knows no family.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mrlhf.models.heads import GPTHiddenModel
from mrlhf.models.linear import WholeLinear, whole_parameter
from mrlhf.models.norms import WideRMSNorm
from mrlhf.models.ops import gated
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.packed_sequences import PackedSequences


class LayerInput(torch.nn.Module):
    """What a layer adds of its input: it is multiplied by a gate, projected and normalised."""

    def __init__(self, config: TransformerConfig, spec: ModelSpec) -> None:
        super().__init__()
        self._activation = spec.activation
        self.gate = WholeLinear(config, spec.hidden_size, spec.layer_input_size)
        self.projection = WholeLinear(config, spec.layer_input_size, spec.hidden_size)
        self.norm = WideRMSNorm(config, spec.hidden_size, spec.norm_eps)

    def forward(self, hidden: Tensor, own: Tensor) -> Tensor:
        """Map hidden [..., hidden] and the layer's input [..., size] to [..., hidden]."""
        both = torch.cat([self.gate(hidden), own], dim=-1)
        output: Tensor = self.norm(self.projection(gated(both, self._activation)))
        return output


class LayerInputs(torch.nn.Module):
    """The input of each layer: of the token a row of a table, and a projection of its embedding."""

    def __init__(
        self, config: TransformerConfig, spec: ModelSpec, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self._spec = spec
        self._scale = spec.layer_input_scale(config.params_dtype)
        self._sequence_parallel = config.sequence_parallel
        width = spec.num_layers * spec.layer_input_size
        self.table = VocabParallelEmbedding(
            spec.padded_vocab(groups.tp.size()),
            width,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=groups.tp,
        )
        self.projection = WholeLinear(config, spec.hidden_size, width)
        self.norm = WideRMSNorm(config, spec.layer_input_size, spec.norm_eps)

    def forward(self, token_ids: Tensor, embeddings: Tensor) -> tuple[Tensor, ...]:
        """Map token_ids [1, tokens] and embeddings [tokens, 1, hidden], or this rank's part of them
        under sequence parallelism, to a tensor [tokens, 1, size] for each layer.
        """
        rows = self.table(token_ids)
        if not self._sequence_parallel:
            rows = rows.transpose(0, 1)
        projected = self.projection(embeddings) * self._spec.hidden_size**-0.5
        size = (self._spec.num_layers, self._spec.layer_input_size)
        inputs = self.norm(projected.unflatten(-1, size)) + rows.unflatten(-1, size) * self._scale
        return (inputs * 2**-0.5).unbind(-2)


class LinkedLayer(TransformerLayer):
    """The layer with this `number`, from 0, of a model whose layers take more than hidden states.

    Its output is multiplied by a number that is not trained.
    """

    def __init__(
        self, config: TransformerConfig, *, spec: ModelSpec, number: int, **options: Any
    ) -> None:
        config = copy(config)
        config.ffn_hidden_size = spec.of_layer(number).ffn_size
        super().__init__(config, **options)
        self._number = number
        self._recomputes = config.recompute_granularity == "full"
        self.layer_scalar = whole_parameter(config, 1, value=1.0).requires_grad_(False)
        self.layer_input = LayerInput(config, spec) if spec.layer_input_size else None
        if spec.key_layer(number) != number:
            self.self_attention.source = spec.key_layer(number)
        self.self_attention.lends = spec.key_layers.count(number) > 1

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **options: Any
    ) -> tuple[Tensor, None]:
        """Compute the layer, as TransformerLayer does."""
        packed = packed_seq_params
        source = self.self_attention.source
        taken = [] if source is None else list(packed.lent[source])
        if self.layer_input is not None:
            taken.append(packed.layer_inputs[self._number])

        def compute(hidden: Tensor, *taken: Tensor) -> tuple[Tensor, ...]:
            if source is not None:  # in the backward pass these have gradients of their own
                packed.lent[source] = taken[:2]
            output, _ = TransformerLayer.forward(self, hidden, packed_seq_params=packed, **options)
            if self.layer_input is not None:
                output = output + self.layer_input(output, taken[-1])
            lent = packed.lent[self._number] if self.self_attention.lends else ()
            return output * self.layer_scalar, *lent

        if self._recomputes and torch.is_grad_enabled():
            output, *lent = checkpoint(compute, False, hidden_states, *taken)
        else:
            output, *lent = compute(hidden_states, *taken)
        if lent:
            packed.lent[self._number] = tuple(lent)
        return output, None


class GPTLinkedModel(GPTHiddenModel):
    """A GPTHiddenModel of linked layers."""

    def __init__(self, *, config: TransformerConfig, spec: ModelSpec, **arguments: Any) -> None:
        super().__init__(config=config, **arguments)
        self.layer_inputs: LayerInputs | None = None
        if spec.layer_input_size:
            self.layer_inputs = LayerInputs(config, spec, self.pg_collection)
        # Recomputed by their block, layers would get hidden states alone; they do it themselves.
        self.decoder.config = copy(config)
        self.decoder.config.recompute_granularity = None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, *arguments: Any, **options: Any
    ) -> Tensor:
        """Return the hidden states, as GPTHiddenModel does."""
        embeddings = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.layer_inputs is not None:
            packed: PackedSequences = options["packed_seq_params"]
            packed.layer_inputs = self.layer_inputs(input_ids, embeddings)
        options["decoder_input"] = embeddings
        output: Tensor = super().forward(input_ids, position_ids, *arguments, **options)
        return output
