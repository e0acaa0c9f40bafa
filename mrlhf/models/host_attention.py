"""Attention on a host by compiled functions, as backends of `attention.attend`.

That of packed sequences includes rotation, the keys of other ranks, and the backward pass. This
file knows shapes, and no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mrlhf.host import kernels
from mrlhf.host.kernels import Kernels, threads_for
from mrlhf.parallel.masks import Packed, Paged

if TYPE_CHECKING:
    from mrlhf.parallel.packed_sequences import Rotation


def serves(query: Tensor, key: Tensor) -> bool:
    """Whether there are functions for such tensors."""
    return kernels.find_for(query) is not None


def attend_paged(
    query: Tensor, key: Tensor, value: Tensor, mask: Paged, scale: float, window: int | None,
    sinks: Tensor | None, cap: float | None,
) -> Tensor:  # fmt: skip
    """Attend to a cache in whose blocks `rotate_store` has transposed the keys."""
    host = kernels.find(query.dtype)
    assert host is not None
    tokens, kv_heads, per_kv_head, dim = query.shape
    tables = mask.block_tables
    if sinks is not None:
        sinks = sinks.float().contiguous()

    out = query.new_empty((tokens, kv_heads * per_kv_head * dim))
    host.attend_paged(
        query, key, value, tables, tables.stride(0), mask.query_edges, mask.lengths, sinks, out,
        len(mask.lengths), kv_heads, per_kv_head, dim, key.shape[1], window or 0,
        scale, cap or 0.0, threads_for(64 * query.numel()),
    )  # fmt: skip
    return out


class _Settings(NamedTuple):
    """The arguments of the functions for packed sequences that have no gradients."""

    host: Kernels
    mask: Packed
    scale: float
    window: int | None
    cap: float | None
    cosines: Tensor  # float32 [positions, rotary_dim / 2]; positions count in each sequence
    sines: Tensor


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Packed,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
    rotation: Rotation | None,
) -> Tensor:
    """Rotate and attend, as `attention.attend` says."""
    host = kernels.find(query.dtype)
    assert host is not None
    assert query.dtype == key.dtype == value.dtype, "q, k and v differ in dtype"
    for edges in (mask.query_edges, mask.key_edges):
        assert edges.dtype == torch.int32 and edges.is_contiguous()
    assert int(mask.query_edges[-1]) == len(query), "the sequences must cover all tokens"

    nothing = query.new_empty((0, 0), dtype=torch.float32)
    tables = (nothing, nothing) if rotation is None else (rotation.cosines, rotation.sines)
    settings = _Settings(host, mask, scale, window, cap, *tables)
    output: Tensor = _PackedAttention.apply(settings, sinks, query, key, value)
    return output


class _PackedAttention(torch.autograd.Function):
    """Keeps q, k, v, its output and a number for each query; no weights of attention.

    It keeps only this rank's own keys and values, and gathers those of others once more.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, sinks: Tensor | None, *projections: Tensor
    ) -> Tensor:
        projections = tuple(
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in projections
        )
        query = projections[0]
        seen = _seen(projections, settings.mask)
        assert len(seen[1]) == int(settings.mask.key_edges[-1]), "the sequences must cover all keys"
        tokens, kv_heads, per_kv_head, dim = query.shape
        heads = kv_heads * per_kv_head
        output = query.new_empty((tokens, heads * dim))
        logsums = query.new_empty((tokens, heads), dtype=torch.float32)

        settings.host.attend_packed(
            *seen, _strides(seen), *_tables(settings), output, logsums, *_sizes(query, settings)
        )
        if sinks is not None:  # a larger sum divides all weights, here and in the backward pass
            alone = logsums
            logsums = torch.logaddexp(alone, sinks.float())
            output.unflatten(1, (heads, dim)).mul_((alone - logsums).exp()[..., None])
        ctx.save_for_backward(output, logsums, sinks, *projections)
        ctx.settings = settings
        return output

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        output, logsums, sinks, *projections = ctx.saved_tensors
        settings: _Settings = ctx.settings
        exchange = settings.mask.exchange
        seen = _seen(projections, settings.mask)
        gradients = [tensor.new_empty(tensor.shape) for tensor in seen]
        if exchange is not None:
            both = seen[1].new_empty((len(seen[1]), seen[1].shape[1], 2, seen[1].shape[2]))
            gradients[1:] = both.unbind(2)

        settings.host.attend_packed_backward(
            *seen, _strides(seen), *_tables(settings),
            output, output_gradients[0].contiguous(), logsums,
            *gradients, _strides(gradients), *_sizes(seen[0], settings),
        )  # fmt: skip
        if exchange is not None:
            gradients[1:] = exchange.give_back(both).unbind(2)
        grad_sinks = None
        if sinks is not None:  # a sink's value is 0, so its weight only takes from the others
            products = (output.float() * output_gradients[0].float()).unflatten(1, (len(sinks), -1))
            weights = (sinks.float() - logsums).exp()
            grad_sinks = -(weights * products.sum(dim=-1)).sum(dim=0).to(sinks.dtype)
        return None, grad_sinks, *gradients


def _seen(projections: Sequence[Tensor], mask: Packed) -> list[Tensor]:
    """Return q of this rank's tokens, and k and v of the tokens that they may see."""
    query, key, value = projections
    if mask.exchange is None:
        return [query, key, value]
    return [query, *mask.exchange.lay_out(torch.stack([key, value], dim=2)).unbind(2)]


def _strides(tensors: Sequence[Tensor]) -> Any:
    """Return the strides of tokens, KV heads and query heads of q, k and v."""
    strides = [stride for tensor in tensors for stride in (*tensor.stride()[:-1], 0)[:3]]
    return (ctypes.c_int64 * len(strides))(*strides)


def _tables(settings: _Settings) -> tuple[Tensor, ...]:
    mask = settings.mask
    return settings.cosines, settings.sines, mask.query_edges, mask.key_edges


def _sizes(query: Tensor, settings: _Settings) -> tuple[Any, ...]:
    """Return the numbers that are the last arguments of both functions."""
    sequences = len(settings.mask.query_edges) - 1
    sizes = (sequences, *query.shape[1:], 2 * settings.cosines.shape[1], settings.window or 0)
    return *sizes, settings.scale, settings.cap or 0.0, threads_for(16 * query.numel())
