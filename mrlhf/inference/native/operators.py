"""What a decoder layer does besides matrix products, on torch's operators: any device, any machine.

The engine uses `kernels` instead on a host that can compile; results agree to rounding. It knows
flat tokens and blocks of the cache, and no model.
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

from mrlhf.inference.native.kernels import Kernels

Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer, [blocks, block_size, groups, head_dim] each."""

# The page size that torch's variable-length attention (FlashAttention 2) works with.
PAGE = 256


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one pass through the model, sequence after sequence.

    Attributes:
        tokens: int64 [tokens].
        positions: int64 [tokens], number of tokens before each in its sequence.
        slots: int64 [tokens], where keys and values go: block number x block_size + place in the
            block.
        query_starts: int32 [sequences + 1], where each sequence's tokens begin.
        lengths: int32 [sequences], tokens of each in the cache after this pass.
        block_tables: int32 [sequences, blocks a sequence].
        last: int64 [rows], the tokens after which logits are wanted.
        most_queries: tokens of the sequence that has most.
        longest: the largest of `lengths`, or more.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    last: Tensor
    most_queries: int
    longest: int


class Operators(Protocol):
    """The steps of a layer; see `TorchOperators`."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add, in place, then normalise."""

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """Rotate q and k, put k and v in the cache."""

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs) -> Tensor:
        """Causal attention to the cache."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up."""


def _paged_attention(q: Tensor, block_size: int) -> Callable[..., Tensor] | None:
    """torch's attention with a block table, where this torch has it and FlashAttention 2 takes such
    tensors.
    """
    dim = q.shape[-1]
    fits = q.dtype != torch.float32 and block_size % PAGE == 0 and dim % 8 == 0 and dim <= 256
    return (
        _variable_length_attention()
        if fits and torch.cuda.get_device_capability(q.device) >= (8, 0)
        else None
    )


@cache
def _variable_length_attention() -> Callable[..., Tensor] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return (
        cast(Callable[..., Tensor], varlen_attn)
        if {"block_table", "num_splits"} <= set(known)
        else None
    )


def attend_paged(
    attention: Callable[..., Tensor],
    q: Tensor,
    layer: Layer,
    inputs: StepInputs,
    window: int | None,
) -> Tensor:
    """Attention through torch's `varlen_attn`, as `q`.

    FlashAttention 2 wants the beginnings of the keys too, though the table says where they are and
    `seqused_k` how many there are; and it is not right with pages when it splits the keys of a
    sequence.
    """
    key_starts = (
        torch.arange(len(inputs.lengths) + 1, dtype=torch.int32, device=q.device) * inputs.longest
    )
    return attention(
        q, *layer, inputs.query_starts, key_starts, inputs.most_queries, inputs.longest,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=True, seqused_k=inputs.lengths,
        block_table=inputs.block_tables, num_splits=1,
    )  # fmt: skip


class TorchOperators:
    """The steps of a layer of one model."""

    def __init__(self, cosines: Tensor, sines: Tensor, eps: float, window: int | None) -> None:
        """Args:
        cosines: float32 [positions, head_dim / 2].
        sines: likewise.
        eps: of every norm.
        window: tokens that a token sees, itself included; None for all.
        """
        self._cosines, self._sines = cosines, sines
        self._eps, self._window = eps, window

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` [tokens, hidden] in place, and return its RMSNorm."""
        if delta is not None:
            hidden += delta
        return self._norm(hidden, weight)

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """Put k and v of `qkv` [tokens, groups, heads_per_group + 2, head_dim] in the cache; q
        [tokens, heads, dim].
        """
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
        if norms is not None:
            q, k = self._norm(q, norms[0]), self._norm(k, norms[1])
        for store, values in zip(layer, (self._rotate(k, inputs)[:, :, 0], v), strict=True):
            store.flatten(0, 1).index_copy_(0, inputs.slots, values)
        return self._rotate(q, inputs).flatten(1, 2)

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs) -> Tensor:
        """Attention of `q` [tokens, heads, head_dim] to what is cached of the same sequences, as
        `q`.
        """
        if q.is_cuda and (paged := _paged_attention(q, layer[0].shape[1])):
            return attend_paged(paged, q, layer, inputs, self._window)
        if inputs.most_queries == 1:
            return self._attend_gathered(
                q[:, None], layer, inputs.block_tables, inputs.lengths, inputs.longest
            )[:, 0]
        # Sequences with one query go together; a chunk of a prompt goes alone, since padding the
        # others to it would take more memory than the model.
        context = torch.empty_like(q)
        starts, lengths = inputs.query_starts.tolist(), inputs.lengths.tolist()
        single = [s for s in range(len(lengths)) if starts[s + 1] - starts[s] == 1]
        for chosen in [single] * bool(single) + [
            [s] for s in range(len(lengths)) if s not in set(single)
        ]:
            rows = torch.tensor([range(starts[s], starts[s + 1]) for s in chosen], device=q.device)
            longest = max(lengths[s] for s in chosen)
            arguments = (inputs.block_tables[chosen], inputs.lengths[chosen], longest)
            context[rows] = self._attend_gathered(q[rows], layer, *arguments)
        return context

    def _attend_gathered(
        self, q: Tensor, layer: Layer, tables: Tensor, lengths: Tensor, longest: int
    ) -> Tensor:
        """Attention of the last tokens of sequences, q [sequences, queries, heads, head_dim], to
        gathered blocks.
        """
        blocks = -(-longest // layer[0].shape[1])
        keys, values = (
            store[tables[:, :blocks].long()].flatten(1, 2).transpose(1, 2) for store in layer
        )
        positions = (
            lengths[:, None, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)[:, None]
        )
        places = torch.arange(keys.shape[2], device=q.device)
        visible = places <= positions
        if self._window is not None:
            visible &= places > positions - self._window
        context = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=visible[:, None], enable_gqa=True
        )
        return context.transpose(1, 2)

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * ffn] as [tokens, ffn]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm as transformers has it: the normalised value is rounded to its dtype, then
        scaled.
        """
        return F.rms_norm(x, x.shape[-1:], eps=self._eps) * weight

    def _rotate(self, x: Tensor, inputs: StepInputs) -> Tensor:
        """x [tokens, groups, heads, head_dim] rotated by the angles of its positions."""
        cosines, sines = (
            table[inputs.positions][:, None, None] for table in (self._cosines, self._sines)
        )
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat(
            [first * cosines - second * sines, second * cosines + first * sines], dim=-1
        ).to(x.dtype)


class HostOperators:
    """The same on compiled kernels; tensors are contiguous and on the host."""

    def __init__(
        self, kernels: Kernels, cosines: Tensor, sines: Tensor, eps: float, window: int | None
    ) -> None:
        """Args: as of `TorchOperators`, and `kernels` for the dtype of the model."""
        self._kernels, self._tables = kernels, (cosines.contiguous(), sines.contiguous())
        self._eps, self._window = eps, window

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add `delta` to `hidden` [tokens, hidden] in place, and return its RMSNorm."""
        return self._kernels.add_rms_norm(hidden, delta, weight, self._eps)

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """Put k and v of `qkv` [tokens, groups, heads_per_group + 2, head_dim] in the cache; q
        [tokens, heads, dim].
        """
        return self._kernels.rotate_store(
            qkv, norms, self._eps, self._tables, inputs.positions, inputs.slots, layer
        )

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs) -> Tensor:
        """Attention of `q` [tokens, heads, head_dim] to what is cached of the same sequences, as
        `q`.
        """
        return self._kernels.attend(
            q, layer, inputs.block_tables, inputs.query_starts, inputs.lengths, self._window
        )

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * ffn] as [tokens, ffn]."""
        return self._kernels.gated(gate_up)
