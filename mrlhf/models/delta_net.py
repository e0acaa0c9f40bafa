"""A gated delta net in place of a layer's attention, for packed sequences.

Ranks split the key heads, with the value heads that share them. Each sequence of a pack begins with
empty states, and what follows a shared prompt with those at its end. This file knows no family.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.models.delta_rule import (
    chunked_parts,
    convolve,
    gated_norm,
    gates_of,
    heads_of,
    split_projections,
)
from mrlhf.models.linear import ColumnLinear, RowLinear, split_parameter
from mrlhf.models.spec import DeltaNet
from mrlhf.models.token_mixing import TokenMixing
from mrlhf.parallel.packed_sequences import PackedSequences


class GatedDeltaNet(TokenMixing, MegatronModule):
    """The heads of this rank, with the interface of megatron-core's self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        net: DeltaNet,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._net = net
        self._tp_group = pg_collection.tp
        # What the chunks need is many times what goes into them.
        self.recomputes = config.recompute_granularity != "full"
        hidden = config.hidden_size
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": self._tp_group,
        }

        heads = net.value_heads // self._tp_group.size()
        self.A_log = split_parameter(config, heads)
        self.dt_bias = split_parameter(config, heads)
        channels = net.channels // self._tp_group.size()
        self.conv1d = split_parameter(config, channels, 1, net.taps)
        self.norm = torch.nn.Parameter(torch.ones(net.value_dim, dtype=config.params_dtype))
        rows = 2 * (net.key_size + net.value_size)
        self.linear_qkvz = ColumnLinear(hidden, rows, gather_output=False, **options)
        self.linear_ba = ColumnLinear(hidden, 2 * net.value_heads, gather_output=False, **options)
        self.linear_proj = RowLinear(net.value_size, hidden, input_is_parallel=True, **options)

    def project(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, ...]:
        """Return the rows of q, k, v and z, and those of the gates."""
        projections = (self.linear_qkvz, self.linear_ba)
        return tuple(linear(hidden_states)[0].squeeze(1) for linear in projections)

    def mix(self, projections: tuple[Tensor, ...], packed: PackedSequences) -> Tensor:
        """Return [tokens, value_heads * value_dim]."""
        lengths, before = packed.part_lengths, packed.parts_before
        taps: Tensor = self.conv1d
        rates: tuple[Tensor, ...] = (self.A_log, self.dt_bias)
        heads = packed.heads
        if heads is not None:
            projections = tuple(heads.gather(projection) for projection in projections)
            keys = len(taps) * self._net.key_size // self._net.channels
            taps = heads.share(taps, [keys, keys, len(taps) - 2 * keys])
            rates = tuple(heads.share(rate, [len(rate)]) for rate in rates)

        x, z, numbers = split_projections(self._net, *projections)
        empty = x.new_zeros((self._net.taps - 1, x.shape[-1]))
        parts = x.split(lengths)
        pasts = [
            empty if part < 0 else torch.cat([empty, parts[part]])[len(parts[part]) :]
            for part in before
        ]
        x = convolve(x, taps, pasts, lengths)

        q, k, v = heads_of(self._net, x)
        gates = gates_of(numbers, *rates)
        output = chunked_parts(q, k, v, gates, lengths, before)
        # Each rank's heads have a part of the gradient of the one norm.
        weight = copy_to_tensor_model_parallel_region(self.norm, group=self._tp_group)
        output = gated_norm(output, z, weight, self.config.layernorm_epsilon).flatten(1)
        return output if heads is None else heads.give_back(output, len(packed.position_ids))
