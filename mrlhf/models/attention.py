"""The door to attention: training and the engine call `attend`, which finds a backend.

It takes several query heads for each KV head. It sees only this rank's heads and knows nothing of
tensor parallelism or of layers. `mrlhf/parallel/masks.py` describes which keys a query sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.models import host_attention
from mrlhf.models.ops import rotate
from mrlhf.parallel.masks import Mask, Packed, Paged

if TYPE_CHECKING:
    from mrlhf.parallel.packed_sequences import Rotation

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None  # type: ignore[assignment]

_FLASH_PAGE = 256  # the page of FlashAttention 2, which torch's `varlen_attn` runs


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    scale: float,
    window: int | None = None,
    rotation: Rotation | None = None,
    keeps_keys: bool = False,
) -> Tensor:
    """Compute causal attention within each sequence, without dropout.

    If the mask has an exchange, the keys and values of whole sequences are gathered. What is kept
    for the backward pass is this rank's share; they are gathered again there.

    Args:
        query: [tokens, kv_heads, heads per KV head, head_dim].
        key: [tokens, kv_heads, head_dim]; if the mask is paged, the cache, [blocks, block_size,
            kv_heads, head_dim].
        value: shaped as `key`.
        scale: products of queries and keys are multiplied by it.
        window: how many tokens a token sees, itself included; None for all before it.
        rotation: rotates queries and keys first. A cache holds keys that are rotated already.
        keeps_keys: whether to keep gathered keys, since they are dropped and computed again anyhow.

    Returns:
        [tokens, heads * head_dim].
    """
    backend = next(
        some for some in _BACKENDS if isinstance(mask, some.mask) and some.serves(query, key)
    )
    if backend.does_all:
        return backend.attend(query, key, value, mask, scale, window, rotation)
    query, key = rotated(query, key, rotation)

    exchange = mask.exchange if isinstance(mask, Packed) else None
    if exchange is None:
        return backend.attend(query, key, value, mask, scale, window)

    def gather_and_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = exchange.gather(torch.stack([key, value], dim=1)).unbind(1)
        return backend.attend(query, keys, values, mask, scale, window)

    if keeps_keys or not torch.is_grad_enabled():
        return gather_and_attend(query, key, value)
    # Imported here because the engine runs without megatron-core, which takes seconds to import.
    from megatron.core.tensor_parallel import checkpoint

    output: Tensor = checkpoint(gather_and_attend, False, query, key, value)
    return output


def rotated(query: Tensor, key: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """Return query and key, shaped as in `attend`, after rotation."""
    if rotation is None:
        return query, key
    cosines, sines = (table.unsqueeze(1) for table in rotation.by_token)
    return rotate(query, cosines.unsqueeze(1), sines.unsqueeze(1)), rotate(key, cosines, sines)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, window: int | None
) -> Tensor:
    """Attend by torch's attention of sequences of any lengths, in one call."""
    if isinstance(mask, Packed):
        key_edges = mask.key_edges
        pages: dict[str, Any] = {}
    else:
        # FlashAttention 2 asks where each sequence's keys begin, although the block table and
        # `seqused_k` say it. With pages its results are wrong when it splits the keys of a
        # sequence, so there is one split.
        numbers = torch.arange(len(mask.query_edges), dtype=torch.int32, device=query.device)
        key_edges = numbers * mask.most_keys
        pages = {"seqused_k": mask.lengths, "block_table": mask.block_tables, "num_splits": 1}

    output = varlen.varlen_attn(
        query.flatten(1, 2),
        key,
        value,
        mask.query_edges,
        key_edges,
        mask.most_queries,
        mask.most_keys,
        scale=scale,
        # The window ends at the query.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[2] > 1,
        **pages,
    )
    assert isinstance(output, Tensor)
    return output.flatten(1)


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Packed, scale: float, window: int | None
) -> Tensor:
    """Attend by torch's scaled_dot_product_attention, sequence by sequence."""
    outputs = []
    queries = query.flatten(1, 2).split(mask.query_lengths)
    keys = key.split(mask.key_lengths)
    values = value.split(mask.key_lengths)

    for q, k, v in zip(queries, keys, values, strict=True):
        seen = None  # causality alone, for which torch has faster kernels
        if len(q) < len(k) or (window is not None and len(k) > window):
            positions = torch.arange(len(k), device=q.device)
            seen = _seen(positions[len(k) - len(q) :, None], positions, window)
        outputs.append(_attend_by_torch(q[None], k[None], v[None], seen, scale)[0])
    return torch.cat(outputs).flatten(1)


def attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, mask: Paged, scale: float, window: int | None
) -> Tensor:
    """Attend by torch's scaled_dot_product_attention to copies of the blocks of each sequence."""
    query = query.flatten(1, 2)

    def attend_last(queries: Tensor, sequences: slice | list[int], longest: int) -> Tensor:
        """Attend with the last tokens of some sequences, [sequences, queries, heads, head_dim]."""
        used = mask.block_tables[sequences, : -(-longest // key.shape[1])].long()
        keys, values = (store[used].flatten(1, 2) for store in (key, value))
        count = queries.shape[1]
        places = torch.arange(count, device=query.device)[:, None]
        positions = mask.lengths[sequences, None, None] - count + places
        seen = _seen(positions, torch.arange(keys.shape[1], device=query.device), window)
        return _attend_by_torch(queries, keys, values, seen[:, None], scale)

    if mask.most_queries == 1:
        return attend_last(query[:, None], slice(None), mask.most_keys).flatten(1)

    # Sequences with one query are computed together. A chunk of a prompt is computed alone: padding
    # the others to its length would take more memory than the model.
    context = torch.empty_like(query)
    starts = mask.query_edges.tolist()
    lengths = mask.lengths.tolist()
    counts = mask.query_edges.diff().tolist()
    single = [number for number, count in enumerate(counts) if count == 1]
    chunks = [[number] for number, count in enumerate(counts) if count != 1]
    for part in [single, *chunks] if single else chunks:
        rows = torch.tensor([range(starts[s], starts[s + 1]) for s in part], device=query.device)
        context[rows] = attend_last(query[rows], part, max(lengths[s] for s in part))
    return context.flatten(1)


def _seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys queries see, from the positions of both, [..., queries, 1] and [keys]."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _attend_by_torch(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Attend with [sequences, tokens, heads, head_dim] each, to the shape of `q`."""
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen,
        is_causal=seen is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return output.transpose(1, 2)


def _has_varlen(query: Tensor, key: Tensor) -> bool:
    """Whether FlashAttention 2 takes such heads, and this torch runs it with windows."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and {"scale", "window_size", "enable_gqa"} <= _varlen_options()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _has_paged_varlen(query: Tensor, key: Tensor) -> bool:
    fits = key.shape[1] % _FLASH_PAGE == 0 and {"block_table", "num_splits"} <= _varlen_options()
    return fits and _has_varlen(query, key)


@cache
def _varlen_options() -> frozenset[str]:
    """Return what torch's attention of sequences of any lengths takes; it may not be there."""
    return frozenset(() if varlen is None else inspect.signature(varlen.varlen_attn).parameters)


def _serves_all(query: Tensor, key: Tensor) -> bool:
    return True


class _Backend(NamedTuple):
    """A way to attend, with the arguments and the result of `attend`; all take a window."""

    attend: Callable[..., Tensor]
    mask: type[Mask]  # which it can serve
    serves: Callable[[Tensor, Tensor], bool]  # whether it can take these queries and keys
    does_all: bool = False  # it also rotates, and gathers keys without keeping them


# The first that serves is taken.
_BACKENDS = (
    _Backend(host_attention.attend_packed, Packed, host_attention.serves, does_all=True),
    _Backend(host_attention.attend_paged, Paged, host_attention.serves),
    _Backend(attend_varlen, Packed, _has_varlen),
    _Backend(attend_varlen, Paged, _has_paged_varlen),
    _Backend(attend_one_by_one, Packed, _serves_all),
    _Backend(attend_gathered, Paged, _serves_all),
)
