"""The steps of a decoder layer besides its matrix products.

`TorchOperators` run on every device. Where a host can compile them, `kernels.HostOperators` are
faster and agree to rounding. This file knows flat tokens and blocks of the cache, and no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.cache_size import NATIVE_GPU_BLOCK
from mrlhf.models.ops import rotate, torch_rms_norm

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer, [blocks, block_size, kv_heads, head_dim] each."""

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of a layer's rotation, float32 [positions, rotary_dim / 2] each."""

# The page size that torch's variable-length attention (FlashAttention 2) works with.
PAGE = NATIVE_GPU_BLOCK


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one pass through the model, sequence after sequence."""

    tokens: Tensor  # token ids, int64 [tokens]
    positions: Tensor  # number of tokens before each in its sequence, int64 [tokens]
    # where keys and values go: block number x block_size + place in it, int64 [tokens]
    cache_places: Tensor
    query_starts: Tensor  # where each sequence's tokens begin, int32 [sequences + 1]
    lengths: Tensor  # tokens of each sequence in the cache after this pass, int32 [sequences]
    block_tables: Tensor  # the blocks of each sequence in order, int32 [sequences, blocks]
    last: Tensor  # places of the tokens after which logits are wanted, int64 [rows]
    most_queries: int  # the largest number of tokens of one sequence in this pass
    longest: int  # the largest of `lengths`, or more


class Operators(Protocol):
    """The steps of a layer of one model."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` [tokens, hidden] in place, and return the RMSNorm of the sum.

        None adds nothing; `weight` is [hidden].
        """

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, tables: Tables, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """Write rotated k and plain v into the cache, and return rotated q [tokens, heads, dim].

        Args:
            qkv: [tokens, kv_heads, heads per KV head + 2, head_dim]: for each KV head its q heads,
                then its k, then its v.
            norms: the weights of the q norm and of the k norm of each head, [head_dim] each, if the
                model has them.
            tables: cosines and sines; dimensions of a head beyond theirs are not rotated.
        """

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs, window: int | None) -> Tensor:
        """Return causal attention of `q` [tokens, heads, head_dim] to the cache, shaped as `q`.

        A token sees the `window` last tokens of its sequence, itself included; None for all.
        """


def add_and_normalise(
    operators: Operators, hidden: Tensor, delta: Tensor | None, norm: Tensor | None
) -> Tensor:
    """Add `delta` to `hidden` in place, and return the input of attention or of the MLP."""
    if norm is not None:
        return operators.add_norm(hidden, delta, norm)
    if delta is not None:
        hidden += delta
    return hidden


def _paged_attention(q: Tensor, block_size: int) -> Callable[..., Tensor] | None:
    """Return torch's attention with a block table.

    None if this torch has none, or FlashAttention 2 does not take such tensors.
    """
    dim = q.shape[-1]
    fits = q.dtype != torch.float32 and block_size % PAGE == 0 and dim % 8 == 0 and dim <= 256
    if not fits or torch.cuda.get_device_capability(q.device) < (8, 0):
        return None
    return _variable_length_attention()


@cache
def _variable_length_attention() -> Callable[..., Tensor] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "block_table" not in known or "num_splits" not in known:
        return None
    return cast(Callable[..., Tensor], varlen_attn)


def attend_paged(
    attention: Callable[..., Tensor],
    q: Tensor,
    layer: Layer,
    inputs: StepInputs,
    window: int | None,
    scale: float,
) -> Tensor:
    """Return causal attention through torch's `varlen_attn`, shaped as `q`."""
    # FlashAttention 2 asks where each sequence's keys begin, although the block table and
    # `seqused_k` say it. With pages its results are wrong when it splits the keys of a sequence,
    # so there is one split.
    numbers = torch.arange(len(inputs.lengths) + 1, dtype=torch.int32, device=q.device)
    keys, values = layer

    return attention(
        q,
        keys,
        values,
        inputs.query_starts,
        numbers * inputs.longest,
        inputs.most_queries,
        inputs.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=inputs.lengths,
        block_table=inputs.block_tables,
        num_splits=1,
    )


class TorchOperators:
    """`Operators` on torch's operators."""

    def __init__(self, eps: float, scale: float) -> None:
        """Take `eps`, added to the mean square in every norm, and the factor `scale` of q @ k."""
        self._eps = eps
        self._scale = scale

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `Operators`."""
        if delta is not None:
            hidden += delta
        return torch_rms_norm(hidden, weight, self._eps)

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, tables: Tables, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """See `Operators`."""
        q = qkv[:, :, :-2]
        k = qkv[:, :, -2:-1]
        v = qkv[:, :, -1]
        if norms is not None:
            q = torch_rms_norm(q, norms[0], self._eps)
            k = torch_rms_norm(k, norms[1], self._eps)

        cosines, sines = (table[inputs.positions][:, None, None] for table in tables)
        keys, values = layer
        rotated_k = rotate(k, cosines, sines)[:, :, 0]
        keys.flatten(0, 1).index_copy_(0, inputs.cache_places, rotated_k)
        values.flatten(0, 1).index_copy_(0, inputs.cache_places, v)
        return rotate(q, cosines, sines).flatten(1, 2)

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs, window: int | None) -> Tensor:
        """See `Operators`."""
        if q.is_cuda and (paged := _paged_attention(q, layer[0].shape[1])):
            return attend_paged(paged, q, layer, inputs, window, self._scale)
        if inputs.most_queries == 1:
            return self._attend_gathered(
                q[:, None], layer, inputs.block_tables, inputs.lengths, inputs.longest, window
            )[:, 0]

        # Sequences with one query are computed together. A chunk of a prompt is computed alone:
        # padding the others to its length would take more memory than the model.
        context = torch.empty_like(q)
        starts = inputs.query_starts.tolist()
        lengths = inputs.lengths.tolist()
        single: list[int] = []
        parts: list[list[int]] = []
        for sequence in range(len(lengths)):
            if starts[sequence + 1] - starts[sequence] == 1:
                single.append(sequence)
            else:
                parts.append([sequence])
        if single:
            parts.insert(0, single)

        for part in parts:
            rows = torch.tensor([range(starts[s], starts[s + 1]) for s in part], device=q.device)
            longest = max(lengths[s] for s in part)
            context[rows] = self._attend_gathered(
                q[rows], layer, inputs.block_tables[part], inputs.lengths[part], longest, window
            )
        return context

    def _attend_gathered(
        self,
        q: Tensor,
        layer: Layer,
        tables: Tensor,
        lengths: Tensor,
        longest: int,
        window: int | None,
    ) -> Tensor:
        """Attend to copies of the blocks of each sequence, side by side.

        `q` holds the last tokens of each sequence, [sequences, queries, heads, head_dim]; `tables`
        are [sequences, blocks], `lengths` [sequences].
        """
        used = tables[:, : -(-longest // layer[0].shape[1])].long()
        keys, values = (store[used].flatten(1, 2).transpose(1, 2) for store in layer)

        queries = torch.arange(q.shape[1], device=q.device)[:, None]
        positions = lengths[:, None, None] - q.shape[1] + queries
        places = torch.arange(keys.shape[2], device=q.device)
        visible = places <= positions
        if window is not None:
            visible &= places > positions - window

        context = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=visible[:, None],
            scale=self._scale,
            enable_gqa=True,
        )
        return context.transpose(1, 2)
