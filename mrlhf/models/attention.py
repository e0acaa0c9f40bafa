"""The door to attention: training and the engine call `attend`, which finds a backend.

It takes several query heads for each KV head. It sees only this rank's heads and knows nothing of
tensor parallelism or of layers. `mrlhf/parallel/masks.py` describes which keys a query sees.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from mrlhf.gpu.library import operator, serves
from mrlhf.models import host_attention
from mrlhf.models.ops import rotate
from mrlhf.parallel.masks import Mask, Packed, Paged

if TYPE_CHECKING:
    from mrlhf.parallel.packed_sequences import Rotation

_SCORES = 1 << 24  # that are in memory at once, where scores are capped by torch
_WIDEST = 256  # dimensions of a head in FlashAttention
_MOST_GAP = 0.05  # of the largest number, between two ways; bfloat16 rounds by 0.004
_log = logging.getLogger(__name__)


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
    sinks: Tensor | None = None,
    cap: float | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Compute causal attention within each sequence, without dropout.

    If the mask has an exchange, the keys and values of whole sequences are gathered. What is kept
    for the backward pass is this rank's share; they are gathered again there.

    Args:
        query: [tokens, kv_heads, heads per KV head, head_dim].
        key: [tokens, kv_heads, head_dim]; if the mask is paged, the cache, [blocks, block_size,
            kv_heads, head_dim].
        value: shaped as `key`; in a cache its heads may be narrower than those of keys.
        scale: products of queries and keys are multiplied by it.
        window: how many tokens a token sees, itself included; None for all before it.
        rotation: rotates queries and keys first. A cache holds keys that are rotated already.
        keeps_keys: whether to keep gathered keys, since they are dropped and computed again anyhow.
        sinks: [heads], a logit of each query head that joins every softmax and has no value, as in
            gpt-oss.
        cap: a scaled product x becomes cap * tanh(x / cap), as in Gemma 2; None: it stays as it is.
        chosen: the keys that each query of a pack attends to, of those that it sees; see
            `sparse_attention.choose_packed`. None: it attends to all.

    Returns:
        [tokens, heads * head_dim of `value`].
    """
    if key.shape[-1] != value.shape[-1]:
        assert isinstance(mask, Paged) and rotation is None
        by = attend_pages if serves(query, key) else attend_gathered
        return by(query, key, value, mask, scale, window, sinks)
    is_plain = sinks is None and cap is None
    able = [some for some in _IMPLEMENTATIONS if is_plain or some.takes_more]
    backend = next(some for some in able if isinstance(mask, some.mask) and some.serves(query, key))
    if chosen is not None:
        assert is_plain and window is None
        by = partial(attend_chosen, chosen=chosen)
        backend = _Implementation(by, Packed, _serves_all, takes_more=False)
    if backend.does_all:
        return backend.attend(query, key, value, mask, scale, window, sinks, cap, rotation)
    more = (sinks, cap) if backend.takes_more else ()
    query, key = rotated(query, key, rotation)

    exchange = mask.exchange if isinstance(mask, Packed) else None
    if exchange is None:
        return backend.attend(query, key, value, mask, scale, window, *more)

    def gather_and_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = exchange.gather(torch.stack([key, value], dim=1)).unbind(1)
        return backend.attend(query, keys, values, mask, scale, window, *more)

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
    return rotate(query, *rotation.by_token), rotate(key, *rotation.by_token)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, mask: Packed, scale: float, window: int | None
) -> Tensor:
    """Attend by torch's attention of sequences of any lengths, in one call."""
    # Before torch 2.13 it groups the query heads without being asked to.
    groups: dict[str, Any] = {}
    if "enable_gqa" in _varlen_options():
        groups["enable_gqa"] = query.shape[2] > 1

    output = _varlen_attn()(
        query.flatten(1, 2),
        key,
        value,
        mask.query_edges,
        mask.key_edges,
        mask.most_queries,
        mask.most_keys,
        scale=scale,
        # The window ends at the query.
        window_size=(-1 if window is None else window - 1, 0),
        **groups,
    )
    assert isinstance(output, Tensor)
    return output.flatten(1)


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Packed, scale: float, window: int | None,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend by torch's scaled_dot_product_attention, sequence by sequence."""
    outputs = []
    queries = query.flatten(1, 2).split(mask.query_lengths)
    keys = key.split(mask.key_lengths)
    values = value.split(mask.key_lengths)

    for q, k, v in zip(queries, keys, values, strict=True):
        seen = None  # causality alone, for which torch has faster kernels
        is_plain = sinks is None and cap is None
        if not is_plain or len(q) < len(k) or (window is not None and len(k) > window):
            positions = torch.arange(len(k), device=q.device)
            seen = _seen(positions[len(k) - len(q) :, None], positions, window)
        outputs.append(attend_by_torch(q[None], k[None], v[None], seen, scale, sinks, cap)[0])
    return torch.cat(outputs).flatten(1)


def attend_chosen(
    query: Tensor, key: Tensor, value: Tensor, mask: Packed, scale: float, window: None, *,
    chosen: Tensor,
) -> Tensor:  # fmt: skip
    """Attend to the `chosen` keys alone, sequence by sequence; see `attend`.

    Which keys a query sees is there for a block of queries at a time, also in the backward pass.
    """

    def attend_block(q: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.zeros((len(rows), len(k)), dtype=torch.bool, device=q.device)
        seen.scatter_(1, rows.long(), True)
        return attend_by_torch(q[None], k[None], v[None], seen, scale, None)[0]

    outputs = []
    queries = query.flatten(1, 2).split(mask.query_lengths)
    parts = (key.split(mask.key_lengths), value.split(mask.key_lengths))
    for q, k, v, rows in zip(queries, *parts, chosen.split(mask.query_lengths), strict=True):
        height = max(1, _SCORES // max(1, q.shape[1] * len(k)))
        end = len(k) - len(q)
        for some, places in zip(q.split(height), rows.split(height), strict=True):
            end += len(some)
            outputs.append(_computed_again(attend_block, some, places, k[:end], v[:end]))
    return torch.cat(outputs).flatten(1)


def attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, mask: Paged, scale: float, window: int | None,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
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
        return attend_by_torch(queries, keys, values, seen[:, None], scale, sinks, cap)

    context = query.new_empty((*query.shape[:-1], value.shape[-1]))
    for rows, sequences, longest in mask.parts():
        context[rows] = attend_last(query[rows], sequences, longest)
    return context.flatten(1)


def attend_pages(
    query: Tensor, key: Tensor, value: Tensor, mask: Paged, scale: float, window: int | None,
    sinks: Tensor | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend to the blocks of each sequence by a kernel of ours on a GPU."""
    output: Tensor = _paged_attention(
        query.flatten(1, 2), key, value, mask.block_tables, mask.query_edges, mask.lengths,
        mask.most_queries, mask.most_keys, window or 0, scale, sinks, cap or 0.0,
    )  # fmt: skip
    return output.flatten(1)


def _attend_gathered_flat(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, query_edges: Tensor, lengths: Tensor,
    most_queries: int, most_keys: int, window: int, scale: float, sinks: Tensor | None,
    cap: float,
) -> Tensor:  # fmt: skip
    """`attend_gathered` with the arguments of `mrlhf.gpu.launch.paged_attention`."""
    mask = Paged(query_edges, lengths, tables, most_queries, most_keys)
    query = q.unflatten(1, (keys.shape[2], -1))
    more = (sinks, cap or None)
    found = attend_gathered(query, keys, values, mask, scale, window or None, *more)
    return found.unflatten(1, (q.shape[1], -1))


_paged_attention = operator(
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor query_edges, "
    "Tensor lengths, int most_queries, int most_keys, int window, float scale, Tensor? sinks, "
    "float cap) -> Tensor",
    _attend_gathered_flat,
)


def _seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys queries see, from the positions of both, [..., queries, 1] and [keys]."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def attend_by_torch(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, sinks: Tensor | None,
    cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend with [sequences, tokens, heads, head_dim] each, to [sequences, tokens of `q`, heads,
    head_dim of `v`].
    """
    if cap is not None:
        assert seen is not None and sinks is None
        return _attend_capped(q, k, v, seen, scale, cap)
    if sinks is not None:
        assert seen is not None
        extended = _with_sinks(q, k, v, seen, sinks / scale)
        return attend_by_torch(*extended, scale, None)[..., : v.shape[-1]]
    if k.shape[-1] != v.shape[-1] and k.shape[2] == 1 and q.shape[2] > 1 and seen is not None:
        # Heads that share the KV head become rows: torch would copy keys and values for each.
        heads = q.shape[2]
        rows = attend_by_torch(
            q.flatten(1, 2)[:, :, None], k, v, seen.repeat_interleave(heads, dim=-2), scale, None
        )
        return rows.view(*q.shape[:3], v.shape[-1])
    if q.is_cuda and q.shape[-1] > _WIDEST and q.shape[2] != k.shape[2]:
        # Each query head gets a copy: torch has no kernel for wider heads that share a KV head,
        # and would keep the scores of all pairs.
        k, v = (part.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for part in (k, v))
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


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float
) -> Tensor:
    """The same with capped scores, which are there for a block of queries at a time.

    All arithmetic is in float32. The backward pass computes the scores again.
    """
    grouped = q.unflatten(2, (k.shape[2], -1))

    def attend_block(some: Tensor, seen: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("sngpd,smgd->sgpnm", some.float(), k.float()) * scale
        scores = torch.tanh(scores / cap) * cap
        weights = scores.masked_fill(~seen.unsqueeze(-3), torch.finfo(scores.dtype).min).softmax(-1)
        return torch.einsum("sgpnm,smgd->sngpd", weights, v.float()).to(q.dtype).flatten(2, 3)

    height = max(1, _SCORES // (len(q) * q.shape[2] * k.shape[1]))
    blocks = zip(grouped.split(height, dim=1), seen.split(height, dim=-2), strict=True)
    return torch.cat([_computed_again(attend_block, *block, k, v) for block in blocks], dim=1)


def _computed_again(attend_block: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """Return the block's output, of which the backward pass keeps the parts alone."""
    output: Tensor = torch.utils.checkpoint.checkpoint(
        attend_block, *parts, use_reentrant=False, preserve_rng_state=False
    )
    return output


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same with one more key that all see; its product with q is `sinks`, its value 0.

    Heads get 8 dimensions more, of which one is used: fast kernels read 8 numbers together.
    """
    more = F.pad(sinks.to(q.dtype)[:, None], (0, 7))
    q = torch.cat([q, more.expand(*q.shape[:-1], 8)], dim=-1)
    sink = F.pad(k.new_ones(*k[:, :1].shape[:-1], 1), (k.shape[-1], 7))
    k = torch.cat([F.pad(k, (0, 8)), sink], dim=1)
    v = F.pad(v, (0, 8, 0, 0, 0, 1))
    return q, k, v, F.pad(seen, (0, 1), value=True)


def _has_varlen(query: Tensor, key: Tensor) -> bool:
    """Whether FlashAttention 2 takes such heads, and this torch runs it with windows."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= _WIDEST
        and {"scale", "window_size"} <= _varlen_options()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and _varlen_works(query.dtype, query.shape[2], query.shape[3])
    )


@cache
def _varlen_works(dtype: torch.dtype, heads: int, head_dim: int) -> bool:
    """Whether `attend_varlen` works as `attend_one_by_one`, tried once; else it warns."""
    takes_third = _activate_flash_attention_3()
    problem = _varlen_problem(dtype, heads, head_dim)
    if problem and takes_third and torch.nn.attention.current_flash_attention_impl() == "FA3":
        _log.warning(
            "FlashAttention 3 does not work here (%s); torch's own takes its place", problem
        )
        torch.nn.attention.restore_flash_attention_impl()
        _varlen_works.cache_clear()  # what was tried with it
        problem = _varlen_problem(dtype, heads, head_dim)
    if problem:
        _log.warning(
            "torch's varlen_attn does not work here (%s); sequences attend one by one, more slowly",
            problem,
        )
    return not problem


def _varlen_problem(dtype: torch.dtype, heads: int, head_dim: int) -> str:
    try:
        gap = max(_varlen_gap(dtype, heads, head_dim, window) for window in (None, 7))
    except Exception as error:  # of the driver or of torch's version
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if gap <= _MOST_GAP else f"it differs by {gap:.2g} of the largest number"


@cache
def _activate_flash_attention_3() -> bool:
    """Let torch attend by FlashAttention 3, if this is a Hopper and the package is there.

    Returns whether torch does.
    """
    if torch.cuda.get_device_capability()[0] != 9 or find_spec("flash_attn_interface") is None:
        return False
    try:  # torch 2.10 has no registry
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except Exception as error:  # also of a package for another version of CUDA or torch
        _log.warning("FlashAttention 3 cannot be loaded (%s); torch's own attends", error)
        return False
    _log.info("attention within packs is FlashAttention 3's")
    return True


@torch.inference_mode(False)
@torch.enable_grad()
def _varlen_gap(dtype: torch.dtype, heads: int, head_dim: int, window: int | None) -> float:
    """Return the largest gap between outputs and gradients of two ways, over their largest."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to("cuda", dtype)

    edges = torch.tensor([0, 40, 43], dtype=torch.int32, device="cuda")
    mask = Packed(edges, edges, 40, 40)
    inputs = draw(43, 2, heads, head_dim), draw(43, 2, head_dim), draw(43, 2, head_dim)
    grad = draw(43, 2 * heads * head_dim)

    def results(way: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        copies = [x.detach().to(dtype).requires_grad_() for x in inputs]
        output = way(*copies, mask, head_dim**-0.5, window)
        return [output.detach(), *torch.autograd.grad(output, copies, grad.to(dtype))]

    # FlashAttention takes no float32, so it is not compared with itself.
    pairs = zip(
        results(attend_varlen, dtype), results(attend_one_by_one, torch.float32), strict=True
    )
    return max(float((mine - true).abs().max() / true.abs().max()) for mine, true in pairs)


@cache
def _varlen_options() -> frozenset[str]:
    """Return what torch's attention of sequences of any lengths takes; it may not be there."""
    attend = _varlen_attn()
    return frozenset(() if attend is None else inspect.signature(attend).parameters)


def _varlen_attn() -> Any:
    """torch's attention of sequences of any lengths; None before torch 2.10."""
    # Imported here because it brings torch's compiler, which ranks on a CPU do not need.
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    return varlen.varlen_attn


def _serves_all(query: Tensor, key: Tensor) -> bool:
    return True


class _Implementation(NamedTuple):
    """A way to attend, with the arguments and the result of `attend`; all take a window."""

    attend: Callable[..., Tensor]
    mask: type[Mask]  # which it can serve
    serves: Callable[[Tensor, Tensor], bool]  # whether it can take these queries and keys
    does_all: bool = False  # it also rotates, and gathers keys without keeping them
    takes_more: bool = True  # sinks and a cap, its last arguments


# The first that serves is taken.
_IMPLEMENTATIONS = (
    _Implementation(host_attention.attend_packed, Packed, host_attention.serves, does_all=True),
    _Implementation(host_attention.attend_paged, Paged, host_attention.serves),
    # It has no cap, and no gradient of the log-sum-exp, which a sink's has; such layers go one
    # by one.
    _Implementation(attend_varlen, Packed, _has_varlen, takes_more=False),
    _Implementation(attend_pages, Paged, serves),
    _Implementation(attend_one_by_one, Packed, _serves_all),
    _Implementation(attend_gathered, Paged, _serves_all),
)
