"""megatron-core's SelfAttention, also with more tensor-parallel ranks than KV heads.

It knows which rows of q, k and v a rank holds (`mrlhf.weights.shard` says the same), and how a rank
comes by the KV head of its query heads. It does not know how attention is computed.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class TensorParallelSelfAttention(SelfAttention):
    """SelfAttention of which several ranks may share a KV head.

    With at most as many ranks as KV heads this is megatron-core's. With more, their number is a
    multiple of the KV heads. Each rank then computes its own query heads and an equal share of all
    keys and values. The ranks gather the shares, and each attends to the one KV head of its query
    heads. In the backward pass the gradients of a share are summed over the ranks that used it. So
    each row of a weight is on one rank alone, with its whole gradient.

    megatron-core gathers the query heads too, over process groups that one layout has for all of a
    process; our roles have different layouts.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of this rank's heads before rotation.

        Args:
            hidden_states: [seq_len, micro_batch, hidden], or this rank's part of seq_len under
                sequence parallelism.
            *args: as for megatron-core.
            **kwargs: as for megatron-core; with more ranks than KV heads they change nothing.

        Returns:
            q [seq_len, micro_batch, heads, head_dim], and k and v with KV heads.
        """
        kv_heads = self.config.num_query_groups
        if self.world_size <= kv_heads:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)

        head_dim = self.hidden_size_per_attention_head
        q_width = self.query_projection_size // self.world_size
        mixed, _ = self.linear_qkv(hidden_states)
        query = mixed[..., :q_width].unflatten(-1, (-1, head_dim))

        # Each rank has the same share of k, followed by the same share of v.
        shares = all_gather_last_dim_from_tensor_parallel_region(
            mixed[..., q_width:], group=self.tp_group
        )
        ranks_per_head = self.world_size // kv_heads
        first = self.tp_group.rank() // ranks_per_head * ranks_per_head
        shares = shares.unflatten(-1, (self.world_size, 2, -1))
        shares = shares[..., first : first + ranks_per_head, :, :]
        key, value = shares.transpose(-3, -2).flatten(-2).unsqueeze(-3).unbind(-2)

        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        return query, key, value
