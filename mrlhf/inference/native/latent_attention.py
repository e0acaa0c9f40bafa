"""Latent attention of a layer over a cache of latents, for all kinds of passes.

Queries are taken to the space of latents, where they attend, and what they get is taken back: the
matrices that give each head's keys and values are absorbed (https://arxiv.org/abs/2405.04434,
section 2.1.2), so that the cache has one vector a token, whatever the number of heads. torch's
operators compute it but for attention itself. It knows flat tokens and blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.inference.native.linear import Linear
from mrlhf.inference.native.operators import Layer, StepInputs, Tables, add_norm
from mrlhf.inference.native.sparse_attention import (
    IndexLayer,
    attend_to_chosen,
    choose_paged,
)
from mrlhf.models.attention import attend
from mrlhf.models.ops import halves, torch_rotate
from mrlhf.models.spec import Latent


@dataclass(frozen=True)
class LatentAttention:
    """The attention of one layer on one rank, which has some of the heads and all latents."""

    latent: Latent
    eps: float  # added to the mean square in the layer's norm
    scale: float  # of the products of queries and keys
    norm: Tensor | None  # weight of the norm before attention, [hidden]
    q_down: Linear | None  # x -> the latent of queries; None if they come from x
    q_norm: Tensor | None  # of that latent, [q_rank]
    q_up: Linear  # to each head's plain dimensions, then its rotated ones
    kv_down: Linear  # x -> the latent of keys and values, then the rotated dimensions of keys
    kv_norm: Tensor  # of the latent, [kv_rank]
    kv_up: Tensor  # to each head's plain key, then its value, [heads, plain + value, kv_rank]
    index: IndexLayer | None  # what chooses the tokens, here and in layers after that have none
    tables: Tables
    proj: Linear  # the output projection

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, inputs: StepInputs, store: Layer
    ) -> Tensor:
        """Add `delta` to `hidden` in place; return this rank's share of attention to its norm."""
        latent = self.latent
        normed = add_norm(hidden, delta, self.norm, self.eps)
        latents = normed
        if self.q_down is not None:
            latents = add_norm(self.q_down(normed), None, self.q_norm, latent.norm_eps)
        q = self.q_up(latents).view(len(hidden), len(self.kv_up), -1)
        keys, values = self.kv_up.split([latent.plain_dim, latent.value_dim], dim=1)

        of_tokens = [table[inputs.positions] for table in self.tables]
        self._store(normed, of_tokens, inputs.cache_places, store[0])
        plain = torch.einsum("thd,hdr->thr", q[..., : latent.plain_dim], keys)
        turned = self._turned(q[..., latent.plain_dim :], of_tokens)
        q = torch.cat([plain, turned], dim=-1)

        stored, index_keys = store[0].split([q.shape[-1], store[0].shape[-1] - q.shape[-1]], dim=-1)
        if latent.indexer is None or inputs.mask.most_keys <= latent.indexer.most:
            # All heads share the one KV head.
            seen = attend(q[:, None], stored, store[1], inputs.mask, scale=self.scale)
            seen = seen.unflatten(-1, (-1, latent.kv_rank))
        else:
            if self.index is not None:
                queries = self.index.queries(normed, latents, of_tokens)
                among = (index_keys, inputs.positions, inputs.mask, latent.indexer.most)
                inputs.chosen[:] = choose_paged(queries, *among)
            seen = attend_to_chosen(q, stored, latent.kv_rank, inputs.chosen, self.scale)
        return self.proj(torch.einsum("thr,hdr->thd", seen, values).flatten(1))

    def _store(
        self, normed: Tensor, of_tokens: list[Tensor], places: Tensor, store: Tensor
    ) -> None:
        """Write the latent, the rotated dimensions and the index key of each token to the cache."""
        down = self.kv_down(normed)
        compressed = down[:, : self.latent.kv_rank].contiguous()
        compressed = add_norm(compressed, None, self.kv_norm, self.latent.norm_eps)
        turned = self._turned(down[:, self.latent.kv_rank :], of_tokens)
        row = torch.cat([compressed, turned], dim=-1)[:, None]
        if self.index is not None:
            row = torch.cat([row, self.index.keys(normed, of_tokens)], dim=-1)
        store.flatten(0, 1).index_copy_(0, places, row)

    def _turned(self, x: Tensor, of_tokens: list[Tensor]) -> Tensor:
        return torch_rotate(halves(x) if self.latent.interleaved else x, *of_tokens)
