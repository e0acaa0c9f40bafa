"""The steps of a decoder layer besides its matrix products.

`TorchOperators` run on every device. `HostOperators` use compiled kernels, on a host that can
compile them. Their results agree to rounding. This file knows flat tokens and blocks of the cache,
and no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.cache_size import NATIVE_GPU_BLOCK
from mrlhf.inference.native.kernels import Kernels, Pass

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer, [blocks, block_size, kv_heads, head_dim] each."""

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of a layer's rotation, float32 [positions, rotary_dim / 2] each."""

# The page size that torch's variable-length attention (FlashAttention 2) works with.
PAGE = NATIVE_GPU_BLOCK


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one pass through the model, sequence after sequence.

    Attributes:
        tokens: the token ids, int64 [tokens].
        positions: the number of tokens before each in its sequence, int64 [tokens].
        cache_places: where each token's keys and values go: block number x block_size + place in
            the block, int64 [tokens].
        query_starts: where each sequence's tokens begin, int32 [sequences + 1].
        lengths: how many tokens of each sequence are in the cache after this pass, int32
            [sequences].
        block_tables: the blocks of each sequence in order, int32 [sequences, blocks].
        last: the places of the tokens after which logits are wanted, int64 [rows].
        most_queries: the number of tokens of the sequence that has most in this pass.
        longest: the largest of `lengths`, or more.
    """

    tokens: Tensor
    positions: Tensor
    cache_places: Tensor
    query_starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    last: Tensor
    most_queries: int
    longest: int

    @cached_property
    def on_host(self) -> Pass:
        """The same for compiled code, as long as this object lives; the tensors are on the host."""
        return Pass(
            self.positions.data_ptr(),
            self.cache_places.data_ptr(),
            self.query_starts.data_ptr(),
            self.lengths.data_ptr(),
            self.block_tables.data_ptr(),
            len(self.tokens),
            len(self.lengths),
            self.block_tables.stride(0),
        )


class Operators(Protocol):
    """The steps of a layer; see `TorchOperators`."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` in place, and return the RMSNorm of the sum."""

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, tables: Tables, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """Rotate q and k, write k and v into the cache, and return q."""

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs, window: int | None) -> Tensor:
        """Causal attention to the cached tokens of the same sequence."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up."""


def enter(
    operators: Operators, hidden: Tensor, delta: Tensor | None, norm: Tensor | None
) -> Tensor:
    """Add `delta` to `hidden` in place, and return what attention or the MLP takes."""
    if norm is not None:
        return operators.add_norm(hidden, delta, norm)
    if delta is not None:
        hidden += delta
    return hidden


def _paged_attention(q: Tensor, block_size: int) -> Callable[..., Tensor] | None:
    """torch's attention with a block table.

    None where this torch has none, or FlashAttention 2 does not take such tensors.
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
    """Causal attention through torch's `varlen_attn`; the result is shaped as `q`.

    FlashAttention 2 asks where each sequence's keys begin, though the block table says where they
    are and `seqused_k` how many there are. With pages its results are wrong when it splits the keys
    of a sequence, so there is one split.
    """
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
    """The steps of a layer of one model."""

    def __init__(self, eps: float, scale: float) -> None:
        """Keep the model's constants.

        Args:
            eps: added to the mean square in every norm.
            scale: products of q and k are multiplied by it.
        """
        self._eps = eps
        self._scale = scale

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` [tokens, hidden] in place, and return its RMSNorm."""
        if delta is not None:
            hidden += delta
        return self._norm(hidden, weight)

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, tables: Tables, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """Write rotated k and plain v into the cache, and return rotated q [tokens, heads, dim].

        Args:
            qkv: [tokens, kv_heads, heads per KV head + 2, head_dim].
            norms: the weights of the q norm and of the k norm of each head, where the model has
                them.
            tables: cosines and sines; the dimensions of a head beyond theirs are not rotated.
            inputs: the pass.
            layer: keys and values of the layer.
        """
        q = qkv[:, :, :-2]
        k = qkv[:, :, -2:-1]
        v = qkv[:, :, -1]
        if norms is not None:
            q = self._norm(q, norms[0])
            k = self._norm(k, norms[1])

        keys, values = layer
        rotated_k = _rotate(k, tables, inputs.positions)[:, :, 0]
        keys.flatten(0, 1).index_copy_(0, inputs.cache_places, rotated_k)
        values.flatten(0, 1).index_copy_(0, inputs.cache_places, v)
        return _rotate(q, tables, inputs.positions).flatten(1, 2)

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs, window: int | None) -> Tensor:
        """Causal attention of `q` [tokens, heads, head_dim] to the cache; shaped as `q`.

        `window` is how many tokens a token sees, itself included; None for all.
        """
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
        """Attention to copies of the blocks of each sequence, side by side.

        Args:
            q: the last tokens of each sequence, [sequences, queries, heads, head_dim].
            layer: keys and values of the layer.
            tables: the blocks of each sequence, [sequences, blocks].
            lengths: how many tokens of each sequence are cached, [sequences].
            longest: the largest of `lengths`.
            window: how many tokens a token sees; None for all.
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

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [tokens, ffn], for `gate_up` [tokens, 2 * ffn]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm as in transformers: the normalised value is rounded to its dtype, then scaled."""
        return F.rms_norm(x, x.shape[-1:], eps=self._eps) * weight


def _rotate(x: Tensor, tables: Tables, positions: Tensor) -> Tensor:
    """Rotate x [tokens, kv_heads, heads, head_dim] by the angles of its positions."""
    cosines, sines = (table[positions][:, None, None] for table in tables)
    turned = x[..., : 2 * cosines.shape[-1]].float()
    first, second = turned.chunk(2, dim=-1)
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., turned.shape[-1] :]], dim=-1)


class HostOperators:
    """The same as `TorchOperators` on compiled kernels; tensors are contiguous, on the host.

    Attributes:
        kernels: compiled for the model's dtype.
        eps: added to the mean square in every norm.
        scale: products of q and k are multiplied by it.
    """

    def __init__(self, kernels: Kernels, eps: float, scale: float) -> None:
        """Keep the model's constants, as `TorchOperators`; `kernels` are for the model's dtype."""
        self.kernels = kernels
        self.eps = eps
        self.scale = scale

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` [tokens, hidden] in place, and return its RMSNorm."""
        return self.kernels.add_rms_norm(hidden, delta, weight, self.eps)

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, tables: Tables, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """Write rotated k and plain v into the cache, and return rotated q [tokens, heads, dim]."""
        return self.kernels.rotate_store(
            qkv, norms, self.eps, tables, inputs.positions, inputs.cache_places, layer
        )

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs, window: int | None) -> Tensor:
        """Causal attention of `q` [tokens, heads, head_dim] to the cache; shaped as `q`."""
        return self.kernels.attend(
            q,
            layer,
            inputs.block_tables,
            inputs.query_starts,
            inputs.lengths,
            window,
            self.scale,
        )

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [tokens, ffn], for `gate_up` [tokens, 2 * ffn]."""
        return self.kernels.gated(gate_up)
