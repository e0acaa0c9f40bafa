"""The steps of a decoder layer besides its products and attention, and the inputs of a pass.

Each is compiled on a CPU with a compiler, and torch's elsewhere; the two agree to rounding. This
file knows flat tokens and blocks of the cache, and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.host import kernels
from mrlhf.host.kernels import threads_for
from mrlhf.models.ops import rotate, torch_rms_norm
from mrlhf.parallel.masks import Paged

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer, [blocks, block_size, kv_heads, head_dim] each.

On a CPU with a compiler the keys of a block are stored as [kv_heads, head_dim, block_size].
"""

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of a layer's rotation, float32 [positions, rotary_dim / 2] each."""


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one pass through the model, sequence after sequence."""

    tokens: Tensor  # token ids, int64 [tokens]
    positions: Tensor  # number of tokens before each in its sequence, int64 [tokens]
    # where keys and values go: block number x block_size + place in it, int64 [tokens]
    cache_places: Tensor
    mask: Paged  # what each token sees in the cache after this pass
    last: Tensor  # places of the tokens after which logits are wanted, int64 [rows]


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """Add `delta` to `hidden` [tokens, hidden] in place, and return the RMSNorm of the sum.

    Without a `delta` nothing is added, and without a `weight` [hidden] nothing is normalised.
    """
    host = None if weight is None else kernels.find_for(hidden, weight)
    if weight is not None and host is not None:
        out = torch.empty_like(hidden)
        sizes = (*hidden.shape, eps, threads_for(hidden.numel()))
        host.rms_norm(hidden, delta, weight, out, None, *sizes)
        return out

    if delta is not None:
        hidden += delta
    return hidden if weight is None else torch_rms_norm(hidden, weight, eps)


def rotate_store(
    qkv: Tensor, norms: Layer | None, eps: float, tables: Tables, inputs: StepInputs, layer: Layer
) -> Tensor:
    """Write rotated k and plain v into the cache, and return rotated q.

    Args:
        qkv: [tokens, kv_heads, heads per KV head + 2, head_dim]: for each KV head its q heads, then
            its k, then its v.
        norms: the weights of the q norm and of the k norm of each head, [head_dim] each, if the
            model has them.
        tables: dimensions of a head beyond theirs are not rotated.

    Returns:
        [tokens, kv_heads, heads per KV head, head_dim].
    """
    tokens, kv_heads, rows, dim = qkv.shape
    cosines, sines = tables
    keys, values = layer
    host = kernels.find_for(qkv)
    if host is not None:
        q = qkv.new_empty((tokens, kv_heads, rows - 2, dim))
        host.rotate_store(
            qkv, *(norms or (None, None)), eps, cosines, sines,
            inputs.positions, inputs.cache_places, q, keys, values,
            tokens, kv_heads, rows - 2, dim, 2 * cosines.shape[1], keys.shape[1],
            threads_for(qkv.numel()),
        )  # fmt: skip
        return q

    q, k, v = qkv.split([rows - 2, 1, 1], dim=2)
    if norms is not None:
        q = torch_rms_norm(q, norms[0], eps)
        k = torch_rms_norm(k, norms[1], eps)
    of_tokens = [table[inputs.positions][:, None, None] for table in tables]
    keys.flatten(0, 1).index_copy_(0, inputs.cache_places, rotate(k, *of_tokens)[:, :, 0])
    values.flatten(0, 1).index_copy_(0, inputs.cache_places, v[:, :, 0])
    return rotate(q, *of_tokens)
