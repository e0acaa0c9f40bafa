"""Causal attention of packed sequences by the compiled functions of `packed_attention.cpp`.

It includes rotation and the backward pass, for hosts, in float32 and bfloat16. `attention` has the
same on torch's operators. This file knows shapes, and no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlhf.host.library import SOURCES, SUFFIXES, functions_of, load_library, threads_for
from mrlhf.parallel.key_exchange import KeyExchange

SOURCE = SOURCES / "packed_attention.cpp"

# The arguments of each function in the order of packed_attention.cpp.
_SIGNATURES = {
    "attend": "pppp pppp pp iiiiii fn",
    "attend_back": "pppp pppp ppp pppp iiiiii fn",
}


class Settings(NamedTuple):
    """The settings of attention besides projections and rotation.

    Attributes:
        query_edges: where each sequence, or the part of it on this rank, begins, and the end; int32
            [sequences + 1] on the host.
        key_edges: the same for the keys that each may see. The last query of each is at the
            position of the last of its keys.
        keys: gets the keys that lie on other ranks; None if there are none.
        scale: products of queries and keys are multiplied by it.
        window: how many tokens a token sees, itself included; None for all before it.
    """

    query_edges: Tensor
    key_edges: Tensor
    keys: KeyExchange | None
    scale: float
    window: int | None


def is_available(dtype: torch.dtype) -> bool:
    """Whether there are functions for the dtype, and this machine can compile them."""
    return _functions(dtype) is not None


def attend(
    projections: tuple[Tensor, ...], rotation: tuple[Tensor, Tensor] | None, settings: Settings
) -> Tensor:
    """Compute causal attention within each sequence, if `is_available`.

    Args:
        projections: for each KV head its q heads, its k and its v in one tensor, [tokens, kv_heads,
            heads per KV head + 2, head_dim]; or q [tokens, heads, head_dim], and k and v [tokens,
            kv_heads, head_dim], which may be of more tokens than q.
        rotation: the cosines and sines of each position, float32 [positions, rotary_dim / 2] each;
            None to rotate nothing. Positions count from 0 in each sequence.

    Returns:
        [tokens, heads * head_dim].
    """
    functions = _functions(projections[0].dtype)
    assert functions is not None
    assert len({tensor.dtype for tensor in projections}) == 1, "q, k and v differ in dtype"
    for edges in (settings.query_edges, settings.key_edges):
        assert edges.dtype == torch.int32 and edges.is_contiguous()
    tokens = len(projections[0])
    assert int(settings.query_edges[-1]) == tokens, "the sequences must cover all tokens"

    if rotation is None:
        nothing = projections[0].new_empty((0, 0), dtype=torch.float32)
        rotation = (nothing, nothing)
    output: Tensor = _Attention.apply(functions, rotation, settings, *projections)
    return output


@cache
def _functions(dtype: torch.dtype) -> dict[str, Any] | None:
    library = load_library(SOURCE, "training") if dtype in SUFFIXES else None
    return None if library is None else functions_of(library, _SIGNATURES, dtype)


class _Attention(torch.autograd.Function):
    """Keeps the projections, its output and a number for each query; no weights of attention.

    It keeps only this rank's own keys and values, and gathers those of others once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: dict[str, Any],
        rotation: tuple[Tensor, Tensor],
        settings: Settings,
        *projections: Tensor,
    ) -> Tensor:
        projections = tuple(
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in projections
        )
        first = projections[0]
        views = _seen(projections, settings)
        assert len(views[1]) == int(settings.key_edges[-1]), "the sequences must cover all keys"
        sizes = _sizes(views, rotation, settings)
        heads = views[0].shape[1] * views[0].shape[2]
        output = first.new_empty((len(first), heads * first.shape[-1]))
        logsums = first.new_empty((len(first), heads), dtype=torch.float32)

        pointers, strides = _places(views)
        functions["attend"](
            *pointers, strides, *_tables(rotation, settings),
            output.data_ptr(), logsums.data_ptr(), *sizes,
        )  # fmt: skip
        ctx.save_for_backward(output, logsums, *projections)
        ctx.functions = functions
        ctx.rotation = rotation
        ctx.settings = settings
        return output

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        output, logsums, *projections = ctx.saved_tensors
        output_gradient = output_gradients[0].contiguous()
        gradients = [
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in projections
        ]

        settings: Settings = ctx.settings
        views = _seen(projections, settings)
        of_views = _by_kv_head(gradients)
        of_keys: Tensor | None = None
        if settings.keys is not None:
            of_keys = views[1].new_empty((len(views[1]), views[1].shape[1], 2, views[1].shape[3]))
            of_views = [of_views[0], of_keys[:, :, :1], of_keys[:, :, 1:]]

        pointers, strides = _places(views)
        targets, target_strides = _places(of_views)
        ctx.functions["attend_back"](
            *pointers, strides, *_tables(ctx.rotation, settings),
            output.data_ptr(), output_gradient.data_ptr(), logsums.data_ptr(),
            *targets, target_strides, *_sizes(views, ctx.rotation, settings),
        )  # fmt: skip

        if settings.keys is not None and of_keys is not None:
            own = settings.keys.give_back(of_keys)
            _, of_own_keys, of_own_values = _by_kv_head(gradients)
            of_own_keys.copy_(own[:, :, :1])
            of_own_values.copy_(own[:, :, 1:])
        return (None, None, None, *gradients)


def _seen(projections: Sequence[Tensor], settings: Settings) -> list[Tensor]:
    """Return q of this rank's tokens, and k and v of the tokens that they may see.

    All are in the form of `_by_kv_head`.
    """
    query, key, value = _by_kv_head(projections)
    if settings.keys is None:
        return [query, key, value]
    both = settings.keys.lay_out(torch.cat([key, value], dim=2))
    return [query, both[:, :, :1], both[:, :, 1:]]


def _by_kv_head(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return q, k and v of each KV head, [tokens, kv_heads, heads of the KV head, head_dim]."""
    if len(tensors) == 1:
        mixed = tensors[0]
        return [mixed[:, :, :-2], mixed[:, :, -2:-1], mixed[:, :, -1:]]
    query, key, value = tensors
    return [query.unflatten(1, (key.shape[1], -1)), key.unsqueeze(2), value.unsqueeze(2)]


def _places(views: Sequence[Tensor]) -> tuple[list[int], Any]:
    """Return the addresses of q, k and v, and each one's strides of tokens, KV and query heads."""
    strides = [stride for view in views for stride in view.stride()[:3]]
    return [view.data_ptr() for view in views], (ctypes.c_int64 * len(strides))(*strides)


def _tables(rotation: tuple[Tensor, Tensor], settings: Settings) -> list[int]:
    """Return the addresses of the tables of positions and of sequences."""
    tables = (*rotation, settings.query_edges, settings.key_edges)
    return [table.data_ptr() for table in tables]


def _sizes(
    views: Sequence[Tensor], rotation: tuple[Tensor, Tensor], settings: Settings
) -> tuple[Any, ...]:
    """Return the numbers that are the last arguments of both functions."""
    tokens, kv_heads, per_kv_head, dim = views[0].shape
    threads = threads_for(16 * tokens * kv_heads * per_kv_head * dim)
    return (
        len(settings.query_edges) - 1, kv_heads, per_kv_head, dim, 2 * rotation[0].shape[1],
        settings.window or 0, settings.scale, threads,
    )  # fmt: skip
