"""A layer with experts: its MLP is a router, experts, and an expert that all tokens go to.

It shares tokens out over the tensor-parallel ranks. Ranks that split an expert are neighbours among
these, and work on the same tokens. This file does not know how experts are chosen, or how tokens
get to experts on other ranks.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from mrlhf.models.experts import RoutedExperts
from mrlhf.models.linear import whole_parameter
from mrlhf.models.router import Router, Routing
from mrlhf.models.spec import Experts
from mrlhf.parallel.packed_sequences import PackedSequences


class SharedGate(torch.nn.Module):
    """The sigmoid of a linear layer with one row."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = whole_parameter(config, 1, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to [..., 1]."""
        return F.linear(x, self.weight).sigmoid()


class Mixture(torch.nn.Module):
    """The MLP of a layer with experts; `experts` are those of this rank.

    `shared`, the expert that all tokens go to, and `shared_gate`, which gives the factor of its
    output, may be None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        experts: Experts,
        number: int,
        shared: MLPSubmodules,
        norm: type[torch.nn.Module],
        groups: ProcessGroupCollection,
    ) -> None:
        """Make the mixture with this `number`, from 0, of zeros; `norm` is that of the model."""
        super().__init__()
        self._tp_group = groups.tp
        self._split_group = groups.expt_tp
        self._sequence_parallel = config.sequence_parallel

        self.router = Router(config, experts, number, groups)
        self.experts = RoutedExperts(config, experts, groups)
        self.shared: torch.nn.Module | None = None
        if experts.shared_ffn_size:
            # The second linear layer takes its width from the configuration.
            wide = copy(config)
            wide.ffn_hidden_size = experts.shared_ffn_size
            self.shared = MLP(
                wide, shared, ffn_hidden_size=wide.ffn_hidden_size, tp_group=groups.tp
            )
        self.shared_gate = SharedGate(config) if experts.shared_gate else None

        self._own_norms = experts.own_norms
        if experts.own_norms:
            sizes = (config.hidden_size, config.layernorm_epsilon)
            self.input_norm = norm(config, *sizes)
            self.output_norm = norm(config, *sizes)
            self.sum_norm = norm(config, *sizes)

    def forward(self, hidden: Tensor, residual: Tensor, packed: PackedSequences) -> Tensor:
        """Return the output for each of this rank's tokens, [tokens, 1, hidden] as `hidden`.

        `hidden` is the norm of `residual`, which router and experts read if they have own norms.
        """
        if not self._own_norms:
            routing = self.router(hidden.squeeze(1), packed)
            return self._with_shared(self._routed(hidden.squeeze(1), routing), hidden)

        routing = self.router(residual.squeeze(1), packed)
        routed = self._routed(self.input_norm(residual).squeeze(1), routing)
        output: Tensor = self.sum_norm(self._with_shared(self.output_norm(routed), hidden))
        return output

    def _routed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Map `tokens` [tokens, hidden] to what their experts give, [tokens, 1, hidden]."""
        if self._sequence_parallel:
            output = self._of_parts(tokens, routing)
        elif self._tp_group.size() > 1:
            output = self._of_copies(tokens, routing)
        else:
            output = self.experts(tokens, routing)

        return output.unsqueeze(1)

    def _with_shared(self, output: Tensor, hidden: Tensor) -> Tensor:
        """Add what the shared expert gives, if there is one, for `hidden` [tokens, 1, hidden]."""
        if self.shared is None:
            return output
        shared, _ = self.shared(hidden)
        if self.shared_gate is not None:
            shared = self.shared_gate(hidden) * shared
        return output + shared

    def _of_parts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the output if every tensor-parallel rank has a part of the tokens.

        The ranks that split an expert work on all of their parts.
        """
        group = self._split_group
        if group.size() == 1:
            output: Tensor = self.experts(tokens, routing)
            return output

        tokens, experts, weights = (
            gather_from_sequence_parallel_region(part, group=group) for part in (tokens, *routing)
        )
        output = self.experts(tokens, Routing(experts, weights))
        return reduce_scatter_to_sequence_parallel_region(output, group=group)

    def _of_copies(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the output if all tensor-parallel ranks have all tokens.

        The ranks share them out, except that ranks that split an expert work on the same ones.
        """
        group = self._tp_group
        split = self._split_group.size()
        shares = group.size() // split
        share = group.rank() // split
        begin = len(tokens) * share // shares
        end = len(tokens) * (share + 1) // shares

        copied = copy_to_tensor_model_parallel_region(tokens, group=group)
        weights = copy_to_tensor_model_parallel_region(routing.weights, group=group)
        own = Routing(routing.experts[begin:end], weights[begin:end])
        output = self.experts(copied[begin:end], own)
        output = F.pad(output, (0, 0, begin, len(tokens) - end))
        return reduce_from_tensor_model_parallel_region(output, group=group)


class MixtureLayer(TransformerLayer):
    """megatron-core's layer with our mixture, for packed sequences alone.

    megatron-core's own mixture routes by other rules than some families, adds the losses of a
    micro-batch, which depend on the packing, and needs TransformerEngine for some layouts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *,
        experts: Experts,
        shared: MLPSubmodules,
        norm: type[torch.nn.Module],
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, pg_collection=pg_collection, **options)
        number = experts.number_of(self.layer_number - 1)  # megatron-core counts from 1
        self.mlp = Mixture(config, experts, number, shared, norm, pg_collection)

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer, as TransformerLayer does.

        `hidden_states` is [tokens, 1, hidden], or this rank's part of them under sequence
        parallelism.
        """
        options.pop("dynamic_inference_decode_only", None)
        hidden_states, context = self._forward_attention(
            hidden_states, packed_seq_params=packed_seq_params, **options
        )

        def mixture(normed: Tensor, residual: Tensor) -> Tensor:
            output: Tensor = self.mlp(normed, residual, packed_seq_params)
            return output

        normed = self.pre_mlp_layernorm(hidden_states)
        if self.recompute_mlp and self.training:
            output = checkpoint(mixture, False, normed, hidden_states)
        else:
            output = mixture(normed, hidden_states)
        return hidden_states + output, context
