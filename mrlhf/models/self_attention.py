"""Self-attention of packed sequences, also with more tensor-parallel ranks than KV heads.

It knows which rows of q, k and v a rank holds (`mrlhf.weights.shard` says the same), and how a rank
gets the KV head of its query heads. `attention` computes what the heads attend to.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mrlhf.models.attention import attend, rotated
from mrlhf.models.linear import split_parameter
from mrlhf.models.ops import wide_rms_norm
from mrlhf.models.rope import Rope
from mrlhf.models.spec import ModelSpec
from mrlhf.models.token_mixing import TokenMixing
from mrlhf.parallel.packed_sequences import PackedSequences, Rotation


class CoreAttention(torch.nn.Module):
    """`attention.attend` with the settings of a layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        """Take the scale and the layer's window from megatron-core's configuration.

        `layer_number` counts from 1 in the whole model. A `softmax_scale` of None is 1 /
        sqrt(head_dim).
        """
        super().__init__()
        assert config.attention_dropout == 0.0
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._window = None
        if config.window_size is not None and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            # megatron-core counts only the tokens before the current one.
            self._window = config.window_size[0] + 1
        self._is_recomputed = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: Rotation | None,
        packed: PackedSequences,
        sinks: Tensor | None = None,
        cap: float | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Rotate q and k, unless `rotation` is None, and attend, to [tokens, heads * head_dim]."""
        return attend(
            query,
            key,
            value,
            packed.mask,
            scale=self._scale,
            window=self._window,
            rotation=rotation,
            keeps_keys=self._is_recomputed,
            sinks=sinks,
            cap=cap,
            chosen=chosen,
        )


class TensorParallelSelfAttention(TokenMixing, SelfAttention):
    """megatron-core's SelfAttention with a forward pass for packed sequences alone.

    Several ranks may share a KV head: if there are more ranks than KV heads, their number is a
    multiple of the KV heads. Each rank then computes its own query heads and an equal share of all
    keys and values. The ranks gather the shares, and each attends to the one KV head of its query
    heads. In the backward pass the gradients of a share are summed over the ranks that used it. So
    each row of a weight is on one rank alone, with its whole gradient.

    megatron-core gathers the query heads too, over the one set of process groups that a process has
    there; our roles have different layouts.

    Attributes:
        sinks: [heads of the rank], see `attention.attend`; None: the model has none.
        source: the layer to whose keys and values it attends, from 0; None: to its own.
        lends: whether other layers attend to its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        spec: ModelSpec,
        rope: Rope | None,
        **options: Any,
    ) -> None:
        """Make the attention of a layer; `spec` has its heads, which may be others than most."""
        config = copy(config)
        config.num_query_groups = spec.num_kv_heads
        config.kv_channels = spec.head_dim
        super().__init__(config=config, **options)
        self._rope = rope
        self._cap = spec.attention_cap
        self._norms_values = spec.norms_values
        # of each KV head, in `linear_qkv`
        self._stored = (1 if spec.keys_are_values else 2) * spec.has_keys
        self.source: int | None = None
        self.lends = False
        self.recomputes = self.checkpoint_core_attention
        self.sinks: torch.nn.Parameter | None = None
        if spec.has_sinks:
            heads = config.num_attention_heads // self.world_size
            self.sinks = split_parameter(config, heads)

    def project(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, ...]:
        """Return q, k and v of this rank's heads before rotation, shaped as for `attend`.

        A gate of the output, shaped as q, is the fourth, if the model has one.
        """
        mixed = self.linear_qkv(hidden_states)[0].squeeze(1)
        kv_heads = self.config.num_query_groups
        if self.source is not None:
            heads = (max(1, kv_heads // self.world_size), -1, self.hidden_size_per_attention_head)
            query = self.q_layernorm(mixed.unflatten(-1, heads))
            return query, *packed.lent[self.source]

        if self.world_size > kv_heads:
            query, key, value = self._gather_shares(mixed)
        else:
            head_dim = self.hidden_size_per_attention_head
            mixed = mixed.unflatten(-1, (kv_heads // self.world_size, -1, head_dim))
            sizes = [mixed.shape[2] - self._stored, *[1] * self._stored]
            query, *stored = mixed.split(sizes, dim=2)
            key = stored[0].squeeze(2)
            value = stored[-1].squeeze(2)

        gate: list[Tensor] = []
        if self.config.attention_output_gate:
            query, *gate = query.unflatten(2, (-1, 2)).unbind(3)
        if self.q_layernorm is not None and not isinstance(self.q_layernorm, IdentityOp):
            query = self.q_layernorm(query.flatten(1, 2)).view(query.shape)
            key = self.k_layernorm(key)
        if self._norms_values:
            ones = torch.ones(value.shape[-1], dtype=torch.float32, device=value.device)
            value = wide_rms_norm(value, ones, self.config.layernorm_epsilon)
        if self.lends:
            packed.lent[self.layer_number - 1] = (key, value)
        return query, key, value, *gate

    def _gather_shares(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's q, and the one k and v for it, out of all ranks' shares."""
        head_dim = self.hidden_size_per_attention_head
        q_width = mixed.shape[-1] - self._stored * self.kv_projection_size // self.world_size
        query = mixed[..., :q_width].unflatten(-1, (1, -1, head_dim))

        # Each rank has the same share of k, followed by the same share of v if there is one.
        shares = all_gather_last_dim_from_tensor_parallel_region(
            mixed[..., q_width:], group=self.tp_group
        )
        ranks_per_head = self.world_size // self.config.num_query_groups
        first = self.tp_group.rank() // ranks_per_head * ranks_per_head
        shares = shares.unflatten(-1, (self.world_size, self._stored, -1))
        shares = shares[..., first : first + ranks_per_head, :, :]
        heads = shares.transpose(-3, -2).flatten(-2).unsqueeze(-3).unbind(-2)
        return query, heads[0], heads[-1]

    def mix(self, projections: tuple[Tensor, ...], packed: PackedSequences) -> Tensor:
        """Return [tokens, heads * head_dim]."""
        query, key, value, *gate = projections
        rotation = None
        if self._rope is not None:
            rotation = packed.rotation(self._rope.frequencies, self._rope.scale)
        if isinstance(self.core_attention, CoreAttention):
            more = (self.sinks, self._cap)
            output: Tensor = self.core_attention(query, key, value, rotation, packed, *more)
            return output * gate[0].flatten(1).sigmoid() if gate else output

        # TransformerEngine's attention is a module of its own, with the window in its settings.
        query, key = rotated(query, key, rotation)
        output = self.core_attention(
            query.flatten(1, 2),
            key,
            value,
            None,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=packed,
        )
        return output.reshape(len(output), -1)
