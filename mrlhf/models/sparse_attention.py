"""Which tokens each token attends to in sparse attention, https://arxiv.org/abs/2512.02556, 2.1.

An indexer has a few small heads of queries and one of keys. The score of a key is the weighted sum
of relu(q . k) over the heads; each token attends to the keys that score highest. Factors that
change no order are left out, and nothing has a gradient. Training and the engine choose by this
file, which knows no layer and no cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mrlhf.models.ops import halves, torch_rotate
from mrlhf.models.spec import Indexer
from mrlhf.parallel.masks import Packed

_PRODUCTS = 1 << 24  # that are in memory at once


class IndexQueries(NamedTuple):
    """What the indexer makes of some tokens, to choose for them."""

    heads: Tensor  # rotated, [..., tokens, heads, head_dim]
    weights: Tensor  # of the heads, float32 [..., tokens, heads]


def turned(x: Tensor, indexer: Indexer, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate index queries or keys, [tokens, heads, head_dim]; see `ops.rotate`."""
    if indexer.interleaved:
        first, rest = x.split([2 * cosines.shape[-1], x.shape[-1] - 2 * cosines.shape[-1]], dim=-1)
        x = torch.cat([halves(first), rest], dim=-1)
    return torch_rotate(x, cosines, sines)


def chosen_keys(queries: IndexQueries, keys: Tensor, positions: Tensor, most: int) -> Tensor:
    """Return the keys that score highest of those that each query sees, the best first.

    Of keys that score alike those that come first in the sequence are better.

    Args:
        queries: of one sequence, or of several with the same number of them.
        keys: [..., keys, head_dim].
        positions: of the queries among the keys, int64 [..., tokens].
        most: how many keys a query attends to.

    Returns:
        Places of keys, int64 [..., tokens, `most` or all]. A query at position p sees p + 1 keys;
        if there are fewer than places, the last of these mean nothing.
    """
    every = torch.arange(keys.shape[-2], device=keys.device)
    columns = keys.float().transpose(-1, -2)
    height = max(1, _PRODUCTS // (queries.weights.shape[-1] * keys.shape[:-1].numel()))
    places = []
    for heads, weights, own in zip(
        queries.heads.split(height, dim=-3),
        queries.weights.split(height, dim=-2),
        positions.split(height, dim=-1),
        strict=True,
    ):
        products = torch.relu(heads.float().flatten(-3, -2) @ columns)
        products = products.unflatten(-2, heads.shape[-3:-1])
        scores = (weights.unsqueeze(-2) @ products).squeeze(-2)
        scores.masked_fill_(every > own.unsqueeze(-1), -torch.inf)
        # Scores are exactly 0 where all products are negative, and topk takes any of those.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        places.append(order[..., :most])
    return torch.cat(places, dim=-2)


def choose_packed(
    queries: IndexQueries, keys: Tensor, mask: Packed, most: int, first: int
) -> Tensor:
    """Choose within the sequences of a pack.

    Args:
        queries: of tokens that are neighbours, from the rank's token number `first` on.
        keys: those that `mask` lays out, [keys, head_dim].

    Returns:
        Places among the keys of the token's sequence, int32 [tokens, `most` or fewer]. A token that
        sees fewer keys has the first of them several times.
    """
    width = min(most, mask.most_keys)
    last = first + len(queries.weights)
    chosen = torch.zeros((last - first, width), dtype=torch.int32, device=keys.device)
    end = 0
    for count, own in zip(mask.query_lengths, keys.split(mask.key_lengths), strict=True):
        start = end
        end += count
        rows = slice(max(start, first) - first, min(end, last) - first)
        if rows.start >= rows.stop:
            continue
        # The last query sees the last key.
        from_end = torch.arange(rows.start, rows.stop, device=keys.device) + first - end
        positions = len(own) + from_end
        some = IndexQueries(*(part[rows] for part in queries))
        places = chosen_keys(some, own, positions, most)
        counted = torch.arange(places.shape[-1], device=keys.device) <= positions[:, None]
        chosen[rows, : places.shape[-1]] = places.where(counted, 0).int()
    return chosen
