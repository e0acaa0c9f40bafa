"""Latent attention of packed sequences, https://arxiv.org/abs/2405.04434, section 2.1.

Keys and values of all heads come from one latent of each token, and part of each key, which is
rotated, is the same in all heads. Ranks split the heads; latents are computed on every rank. This
file knows no family.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.models.linear import ColumnLinear, RowLinear, WholeLinear
from mrlhf.models.norms import RMSNorm
from mrlhf.models.ops import halves
from mrlhf.models.rope import Rope
from mrlhf.models.self_attention import CoreAttention
from mrlhf.models.spec import Indexer, Latent
from mrlhf.models.token_mixing import TokenMixing
from mrlhf.parallel.packed_sequences import PackedSequences


class IndexerWeights(torch.nn.Module):
    """The weights of an indexer, which are kept for files and not trained."""

    def __init__(self, config: TransformerConfig, indexer: Indexer, q_rank: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.wq_b = WholeLinear(config, q_rank, indexer.heads * indexer.head_dim)
        self.wk = WholeLinear(config, hidden, indexer.head_dim)
        self.k_norm = torch.nn.LayerNorm(indexer.head_dim, dtype=config.params_dtype)
        self.weights_proj = WholeLinear(config, hidden, indexer.heads)
        self.requires_grad_(False)


class LatentSelfAttention(TokenMixing, MegatronModule):
    """Self-attention of the heads of this rank, with the interface of megatron-core's.

    Keys and values are computed for each head, so that the backends of other models attend, and
    ranks exchange keys as theirs do. Values are filled up with zeros to the size of keys.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int,
        latent: Latent,
        rope: Rope,
        pg_collection: ProcessGroupCollection,
        indexer: Indexer | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._latent = latent
        self._rope = rope
        self._rotary_dim = 2 * len(rope.frequencies)
        self._tp_group = pg_collection.tp
        self.recomputes = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        heads = config.num_attention_heads
        hidden = config.hidden_size
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": self._tp_group,
        }

        rows = heads * config.kv_channels
        if latent.q_rank is None:
            self.linear_q_proj = ColumnLinear(hidden, rows, gather_output=False, **options)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, latent.q_rank)
            self.q_layernorm = RMSNorm(config, latent.q_rank, latent.norm_eps)
            self.linear_q_up_proj = ColumnLinear(
                latent.q_rank, rows, gather_output=False, **options
            )
        self.linear_kv_down_proj = WholeLinear(config, hidden, latent.kv_rank + self._rotary_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, latent.norm_eps)
        rows = heads * (latent.plain_dim + latent.value_dim)
        self.linear_kv_up_proj = ColumnLinear(latent.kv_rank, rows, gather_output=False, **options)
        self.core_attention = CoreAttention(config, layer_number, config.softmax_scale)
        self.linear_proj = RowLinear(
            heads * latent.value_dim, hidden, input_is_parallel=True, **options
        )
        if indexer is not None:
            assert latent.q_rank is not None, "its queries come from latents"
            self.indexer = IndexerWeights(config, indexer, latent.q_rank)

    def project(
        self, hidden_states: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [tokens, heads * head_dim], k and v before the rotated part of k is added, and
        that part [tokens, rotary_dim].
        """
        latent = self._latent
        if latent.q_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            compressed = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query = self.linear_q_up_proj(compressed)[0]

        compressed, rotated = self.linear_kv_down_proj(hidden_states).split(
            [latent.kv_rank, self._rotary_dim], dim=-1
        )
        keys_values = self.linear_kv_up_proj(self.kv_layernorm(compressed))[0]
        # Each rank's heads have a part of the gradient.
        if self.config.sequence_parallel:
            rotated = gather_from_sequence_parallel_region(
                rotated, tensor_parallel_output_grad=True, group=self._tp_group
            )
        else:
            rotated = copy_to_tensor_model_parallel_region(rotated, group=self._tp_group)
        return query.squeeze(1), keys_values.squeeze(1), rotated.squeeze(1)

    def mix(self, projections: tuple[Tensor, ...], packed: PackedSequences) -> Tensor:
        """Return [tokens, heads * value_dim]; in each head the rotated dimensions come first."""
        query, keys_values, rotated = projections
        latent = self._latent
        head_dim = latent.plain_dim + self._rotary_dim
        query = query.unflatten(-1, (-1, head_dim))
        plain, turned = query.split([latent.plain_dim, self._rotary_dim], dim=-1)
        if latent.interleaved:
            turned = halves(turned)
            rotated = halves(rotated)
        query = torch.cat([turned, plain], dim=-1).unsqueeze(2)

        keys_values = keys_values.unflatten(-1, (-1, latent.plain_dim + latent.value_dim))
        plain, value = keys_values.split([latent.plain_dim, latent.value_dim], dim=-1)
        rotated = rotated[:, None].expand(-1, plain.shape[1], -1)
        key = torch.cat([rotated, plain], dim=-1)
        value = F.pad(value, (0, head_dim - latent.value_dim))

        rotation = packed.rotation(self._rope.frequencies, self._rope.scale)
        output = self.core_attention(query, key, value, rotation, packed)
        return output.unflatten(-1, (-1, head_dim))[..., : latent.value_dim].flatten(-2)
