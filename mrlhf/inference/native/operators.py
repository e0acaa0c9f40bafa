"""The steps of a decoder layer besides its products and attention, and the inputs of a pass.

Each is compiled on a CPU with a compiler, and torch's elsewhere; the two agree to rounding. This
file knows flat tokens and blocks of the cache, and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrlhf.gpu.library import operator, serves
from mrlhf.host import kernels
from mrlhf.host.kernels import threads_for
from mrlhf.inference.native.sparse_attention import Chosen
from mrlhf.models.ops import torch_rms_norm, torch_rotate
from mrlhf.parallel.masks import Paged

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer, [blocks, block_size, kv_heads, head_dim] each.

On a CPU with a compiler the keys of a block are stored as [kv_heads, head_dim, block_size]. With
latent attention values are the first numbers of keys, in the same memory; the last numbers of keys
are those of the indexer, if the layer has one. A layer with a delta net has, of each sequence, the
rows before the next token that its convolution sees, [slots, taps - 1, channels], and its states,
float32 [slots, value_heads, key_dim, value_dim].
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
    # where the states of each sequence lie, int64 [sequences]; None or empty if there are none
    slots: Tensor | None = None
    counts: tuple[int, ...] = ()  # tokens of each sequence; empty if each has one
    # what the last indexer of this pass chose; empty if it chose nothing yet
    chosen: list[Chosen] = field(default_factory=list)


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """Add `delta` to `hidden` [tokens, hidden] in place, and return the RMSNorm of the sum.

    Without a `delta` nothing is added, and without a `weight` [hidden] nothing is normalised. A
    `weight` in float32 multiplies bfloat16 numbers before these are rounded.
    """
    host = None if weight is None else kernels.find_for(hidden, weight)
    if weight is not None and host is not None:
        out = torch.empty_like(hidden)
        sizes = (*hidden.shape, eps, threads_for(hidden.numel()))
        host.rms_norm(hidden, delta, weight, out, None, *sizes)
        return out

    if weight is not None and serves(hidden):
        return _add_rms_norm(hidden, delta, weight, eps)
    return _add_norm_by_torch(hidden, delta, weight, eps)


def _add_norm_by_torch(
    hidden: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float
) -> Tensor:
    if delta is not None:
        hidden += delta
    return hidden if weight is None else _norm(hidden, weight, eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x if x.dtype == weight.dtype else x.float()
    return torch_rms_norm(wide, weight, eps).to(x.dtype)


_add_rms_norm = operator(
    "add_rms_norm(Tensor(a!) hidden, Tensor? delta, Tensor weight, float eps) -> Tensor",
    _add_norm_by_torch,
)


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
        if norms is not None and norms[0].dtype != qkv.dtype:
            qkv[:, :, :-2] = _norm(qkv[:, :, :-2], norms[0], eps)
            qkv[:, :, -2] = _norm(qkv[:, :, -2], norms[1], eps)
            norms = None
        q = qkv.new_empty((tokens, kv_heads, rows - 2, dim))
        host.rotate_store(
            qkv, *(norms or (None, None)), eps, cosines, sines,
            inputs.positions, inputs.cache_places, q, keys, values,
            tokens, kv_heads, rows - 2, dim, 2 * cosines.shape[1], keys.shape[1],
            threads_for(qkv.numel()),
        )  # fmt: skip
        return q

    q_norm, k_norm = norms or (None, None)
    places = (inputs.positions, inputs.cache_places)
    compute = _rotate_store if serves(qkv) else _rotate_store_by_torch
    q = compute(qkv, q_norm, k_norm, eps, cosines, sines, *places, keys, values)
    return q.view(tokens, kv_heads, rows - 2, dim)


def rotate_queries(
    q: Tensor, norms: Layer | None, eps: float, tables: Tables, inputs: StepInputs
) -> Tensor:
    """Return rotated q [tokens, kv_heads, heads per KV head, head_dim] where no keys are stored."""
    cosines, sines = (table[inputs.positions] for table in tables)
    return torch_rotate(q if norms is None else _norm(q, norms[0], eps), cosines, sines)


def _rotate_store_by_torch(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    cosines: Tensor, sines: Tensor, positions: Tensor, places: Tensor,
    keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """`mrlhf.gpu.launch.rotate_store` on torch's operators."""
    q, k, v = qkv.split([qkv.shape[2] - 2, 1, 1], dim=2)
    if q_norm is not None and k_norm is not None:
        q = _norm(q, q_norm, eps)
        k = _norm(k, k_norm, eps)
    of_tokens = cosines[positions], sines[positions]
    keys.flatten(0, 1).index_copy_(0, places, torch_rotate(k, *of_tokens)[:, :, 0])
    values.flatten(0, 1).index_copy_(0, places, v[:, :, 0])
    return torch_rotate(q, *of_tokens).flatten(1, 2)


_rotate_store = operator(
    "rotate_store(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cosines, "
    "Tensor sines, Tensor positions, Tensor places, Tensor(a!) keys, Tensor(b!) values) -> Tensor",
    _rotate_store_by_torch,
)
