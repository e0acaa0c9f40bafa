"""Attention to the tokens that an indexer chooses, over a cache of latents and of index keys.

torch's operators compute it. It knows flat tokens and blocks of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.native.linear import Linear
from mrlhf.models.attention import attend_by_torch
from mrlhf.models.sparse_attention import IndexQueries, chosen_keys, turned
from mrlhf.models.spec import Indexer
from mrlhf.parallel.masks import Paged

_GATHERED = 1 << 26  # numbers of latents that are in memory at once


@dataclass(frozen=True)
class IndexLayer:
    """The indexer of one layer, which every rank has whole."""

    indexer: Indexer
    q: Linear  # the latent of queries -> all heads
    k: Linear  # x -> the one key
    k_norm: tuple[Tensor, Tensor]  # weight and bias, [head_dim] each
    weights: Tensor  # [heads, hidden]

    def keys(self, normed: Tensor, of_tokens: list[Tensor]) -> Tensor:
        """Return the index keys of tokens, [tokens, 1, head_dim]."""
        key = F.layer_norm(self.k(normed), (self.indexer.head_dim,), *self.k_norm, eps=1e-6)
        return turned(key[:, None], self.indexer, *of_tokens)

    def queries(self, normed: Tensor, latents: Tensor, of_tokens: list[Tensor]) -> IndexQueries:
        """Return the index queries of tokens."""
        heads = self.q(latents).view(len(normed), self.indexer.heads, self.indexer.head_dim)
        weights = F.linear(normed.float(), self.weights.float())
        return IndexQueries(turned(heads, self.indexer, *of_tokens), weights)


class Chosen(NamedTuple):
    """What some queries attend to."""

    rows: Tensor  # the queries, int64 [queries]
    places: Tensor  # in the cache, int64 [queries, keys]
    counted: Tensor  # whether a place is one, bool [queries, keys]


def choose_paged(
    queries: IndexQueries, store: Tensor, positions: Tensor, mask: Paged, most: int
) -> Iterator[Chosen]:
    """Choose for all queries; `store` are the index keys, [blocks, block_size, 1, head_dim]."""
    size = store.shape[1]
    for rows, sequences, longest in mask.parts():
        blocks = mask.block_tables[sequences, : -(-longest // size)].long()
        keys = store[blocks].flatten(1, 3)
        own = positions[rows]
        some = IndexQueries(*(part[rows] for part in queries))
        found = chosen_keys(some, keys, own, most)

        every_row = blocks[:, None].expand(-1, rows.shape[1], -1)
        places = every_row.gather(2, found // size) * size + found % size
        counted = torch.arange(found.shape[-1], device=own.device) <= own[..., None]
        yield Chosen(*(part.flatten(0, 1) for part in (rows, places, counted)))


def attend_to_chosen(
    query: Tensor, keys: Tensor, value_dim: int, chosen: Iterable[Chosen], scale: float
) -> Tensor:
    """Attend to the chosen tokens alone.

    Args:
        query: [tokens, heads, head_dim].
        keys: [blocks, block_size, 1, head_dim], of which the first `value_dim` numbers are values.

    Returns:
        [tokens, heads, `value_dim`].
    """
    output = query.new_empty((*query.shape[:-1], value_dim))
    stored = keys.flatten(0, 1)
    for part in chosen:
        height = max(1, _GATHERED // (part.places.shape[1] * keys.shape[-1]))
        for some in zip(*(numbers.split(height) for numbers in part), strict=True):
            rows, places, counted = some
            own = stored[places]
            seen = counted[:, None, None]
            found = attend_by_torch(
                query[rows][:, None], own, own[..., :value_dim], seen, scale, None
            )
            output[rows] = found[:, 0]
    return output
