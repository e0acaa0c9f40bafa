"""Launches of the Triton kernels on tensors of a GPU, contiguous if nothing else is said.

Importing this file needs Triton, which torch's builds for CUDA bring. It knows shapes, no model.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mrlhf.gpu import attention_kernels, delta_kernels, kernels

_LEAST_PART = 256  # keys of a sequence below which splitting them costs more than it brings
_LEAST_ROWS = 16  # of a matrix product on tensor cores
_SMALL_SHARED = 99 * 1024  # bytes of shared memory of a program on an L40S; an A100 has 163 KiB
ROWS_EACH = 32  # rows of one program in the backward pass of a norm

# What is compiled is kept on this machine: a home is often slow, and shared by all machines.
if not os.environ.keys() & {"TRITON_CACHE_DIR", "TRITON_HOME"}:
    _cache = Path(tempfile.gettempdir(), f"triton_{os.getuid()}")
    _cache.mkdir(mode=0o700, exist_ok=True)
    if _cache.stat().st_uid == os.getuid():  # another user could put code there
        os.environ["TRITON_CACHE_DIR"] = str(_cache)


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `hidden` [rows, size] in place, and return the sum's RMSNorm."""
    out = torch.empty_like(hidden)
    _norm(hidden, delta, weight, out, None, eps)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of x [rows, size], and the factor of each row, float32 [rows]."""
    out = torch.empty_like(x)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _norm(x, None, weight, out, scales, eps)
    return out, scales


def _norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, scales: Tensor | None, eps: float
) -> None:
    rows, size = x.shape
    if rows:
        block = triton.next_power_of_2(size)
        kernels.add_rms_norm[(rows,)](
            x, delta, weight, out, scales, size, eps,
            ADDS=delta is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [rows, size] and of the weight, float32 [size]."""
    rows, size = x.shape
    grad_x = torch.empty_like(x)
    programs = triton.cdiv(rows, ROWS_EACH)
    parts = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        kernels.rms_norm_backward[(programs,)](
            grad, x, weight, scales, grad_x, parts, rows, size,
            EACH=ROWS_EACH, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return grad_x, parts.sum(dim=0)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [rows, size] of gate_up [rows, 2 * size]."""
    rows, both = gate_up.shape
    out = gate_up.new_empty(rows, both // 2)
    if rows:
        kernels.gated[_gated_grid(rows, both // 2)](gate_up, out, both // 2, BLOCK=_GATED_BLOCK)
    return out


def gated_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up [rows, 2 * size] for that of silu(gate) * up."""
    rows, size = grad.shape
    below = torch.empty_like(gate_up)
    if rows:
        kernels.gated_backward[_gated_grid(rows, size)](
            grad, gate_up, below, size, BLOCK=_GATED_BLOCK
        )
    return below


_GATED_BLOCK = 1024
_COLUMNS = 1024  # of logits that are summarised together


def _gated_grid(rows: int, size: int) -> tuple[int, int]:
    return rows, triton.cdiv(size, _GATED_BLOCK)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """Rotate x [tokens, heads, dim] or [tokens, heads, group, dim], or turn it back.

    Args:
        x: its last dimension is dense.
        cosines: float32 [tokens, rotary_dim / 2].
        sines: as `cosines`.
        back: whether to rotate the other way, which is the gradient's.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 3:
        x = x[:, :, None]
    tokens, outer, group, dim = x.shape
    if tokens:
        kernels.rotate[(tokens, outer * group)](
            x, cosines, sines, out, group, dim, cosines.shape[1], *x.stride()[:3],
            -1.0 if back else 1.0, BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return out


def rotate_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Write rotated k and plain v into the cache, and return rotated q [tokens, heads, dim].

    qkv is [tokens, kv_heads, heads per KV head + 2, dim]; q_norm and k_norm, [dim], weigh the norm
    of each head, if there is one; cosines and sines are float32 [positions, rotary_dim / 2];
    positions, and places in the cache, int64 [tokens]; keys and values [blocks, block_size,
    kv_heads, dim].
    """
    tokens, kv_heads, members, dim = qkv.shape
    group = members - 2
    q = qkv.new_empty(tokens, kv_heads * group, dim)
    if tokens:
        kernels.rotate_store[(tokens, kv_heads * members)](
            qkv, q_norm, k_norm, cosines, sines, positions, places, q, keys, values,
            kv_heads, dim, cosines.shape[1], eps,
            GROUP=group, NORMS=q_norm is not None, BLOCK=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return q


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    most_queries: int,
    longest: int,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
    splits: int = 0,
) -> Tensor:
    """Return causal attention of the last tokens of each sequence to its pages.

    Args:
        q: [tokens, heads, dim], sequence after sequence.
        keys: [blocks, block_size, kv_heads, dim].
        values: as `keys`; if there are fewer in a head, they are its first numbers of `keys`, which
            may then be a part of longer rows.
        tables: blocks of each sequence, int32 [sequences, blocks], dense in its rows.
        query_starts: int32 [sequences + 1].
        lengths: tokens of each sequence in the cache, int32 [sequences].
        most_queries: the most tokens of a sequence in q; if it is 1, each sequence has one.
        longest: no sequence is longer.
        window: how many tokens a token sees, itself included; 0 for all.
        scale: factor of q @ k.
        sinks: one more logit of each head, without a value, [heads].
        cap: a score x becomes cap * tanh(x / cap); 0: it stays as it is.
        splits: into how many parts the keys of a sequence are cut; 0 chooses.
    """
    tokens, heads, width = q.shape
    sequences = len(lengths)
    page, kv_heads = keys.shape[1:3]
    dim = values.shape[-1]
    more = width - dim
    group = heads // kv_heads
    lanes = triton.next_power_of_2(max(_LEAST_ROWS, dim))
    more_lanes = triton.next_power_of_2(max(_LEAST_ROWS, more)) if more else 0

    decodes = most_queries == 1
    tiles = attention_tiles(
        decodes and group <= _LEAST_ROWS,
        (lanes + more_lanes) * q.element_size(),
        _properties(q.device)["max_shared_mem"],
    )
    most_heads = tiles.rows if decodes else tiles.rows // 2
    head_blocks = triton.cdiv(group, most_heads)
    heads_each = triton.cdiv(group, head_blocks)
    if decodes:
        queries = 1
        blocks = sequences * head_blocks
        splits = splits or count_splits(blocks * kv_heads, longest, q.device)
    else:
        queries = tiles.rows // heads_each
        blocks = (tokens // queries + sequences) * head_blocks
        splits = 1

    out = q.new_empty(tokens, heads, dim)
    several = splits if splits > 1 else 0
    parts = torch.empty(several, *out.shape, dtype=torch.float32, device=q.device)
    sums, tops = torch.empty(2, several, tokens, heads, dtype=torch.float32, device=q.device)
    rows = triton.next_power_of_2(max(_LEAST_ROWS, queries * heads_each))

    attention_kernels.paged_attention[(blocks, kv_heads, splits)](
        q, keys, values, tables, query_starts, lengths, sinks, out, parts, sums, tops,
        sequences, kv_heads, dim, more, keys.stride(2), tables.stride(0), scale, window,
        GROUP=group, HEADS=heads_each, PAGE=page, QUERIES=queries, ROWS=rows, KEYS=tiles.keys,
        DIM=lanes, MORE=more_lanes, CAP=cap, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        attention_kernels.join_splits[(tokens * heads,)](
            parts, sums, tops, sinks, out, tokens * heads, splits, heads, dim,
            DIM=lanes, num_warps=1,
        )  # fmt: skip
    return out


class Tiles(NamedTuple):
    """What a program of attention holds at once."""

    rows: int  # of q
    keys: int
    stages: int  # blocks of keys that are loaded before they are used
    warps: int = 4


def attention_tiles(few: bool, width: int, shared: int) -> Tiles:
    """The tiles for keys of `width` bytes where a program has so many bytes of `shared` memory.

    An L40S has room for all but the larger rows of latents, which need that of an A100. `few` says
    that there are not more than 16 rows.
    """
    if width > 1152:  # latents, and 512 numbers, in float32
        return Tiles(16, 16, 2, 8)
    if width > 1024:  # latents of 512 + 64 numbers in bfloat16
        return Tiles(64 if shared > _SMALL_SHARED else 32, 32, 3, 8)
    if width == 1024:  # 256 numbers of float32, or 512 of bfloat16
        return Tiles(32, 16, 2)
    return Tiles(64, 32, 2) if width >= 512 and not few else Tiles(64, 64, 3)


def count_splits(programs: int, longest: int, device: torch.device) -> int:
    """Into how many parts, a power of two, keys are cut so that all multiprocessors have work."""
    most = max(1, longest // _LEAST_PART)
    wanted = max(1, min(most, 2 * _properties(device)["multiprocessor_count"] // programs))
    return 1 << (wanted.bit_length() - 1)


@cache
def _properties(device: torch.device) -> dict[str, int]:
    if device.type == "cpu":  # in Triton's interpreter
        return {"multiprocessor_count": 1, "max_shared_mem": _SMALL_SHARED}
    found: dict[str, int] = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return found


def logit_blocks(logits: Tensor, factor: float, blocks: int, each: int) -> Tensor:
    """Return `mrlhf.inference.native.sampler._logit_blocks` of logits [batch, vocab_shard]."""
    summaries = torch.empty(2, len(logits), blocks, dtype=torch.float32, device=logits.device)
    kernels.logit_blocks[(len(logits), blocks)](
        logits, summaries, logits.shape[1], logits.stride(0), factor, COLUMNS=each
    )
    return summaries


def draw(
    logits: Tensor,
    factor: float,
    summaries: Tensor,
    uniform: Tensor,
    rank: int,
    first: int,
    each: int,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    """Write `mrlhf.inference.native.sampler._draw` of logits [batch, vocab_shard]."""
    ranks, _, rows, blocks = summaries.shape
    kernels.draw[(rows,)](
        logits, summaries, uniform, tokens, logprobs, logits.shape[1], blocks, ranks, rank, first,
        logits.stride(0), factor, COLUMNS=each, BLOCKS=triton.next_power_of_2(ranks * blocks),
    )  # fmt: skip


def sort_by_expert(chosen: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort `chosen` [tokens, per_token] by expert; those outside `first` to + `count` come last.

    Returns:
        The token of each row, int32 [rows]; the row of each choice, int32 [choices]; and the end of
        each expert's rows, int32 [count].
    """
    tokens, places = torch.empty(2, chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(count, dtype=torch.int32, device=chosen.device)
    kernels.sort_by_expert[(count + 1,)](
        chosen, tokens, places, ends, chosen.numel(), chosen.shape[1], first, count, BLOCK=_COLUMNS
    )
    return tokens, places, ends


def join_experts(outputs: Tensor, places: Tensor, ends: Tensor, shares: Tensor) -> Tensor:
    """Return the sums [tokens, size] of share * output over a token's choices with an expert here.

    `outputs` are [rows, size], `places` and `ends` from `sort_by_expert`, `shares` float32 [tokens,
    per_token].
    """
    out = outputs.new_empty(len(shares), outputs.shape[1])
    sizes = (shares.shape[1], len(ends), out.shape[1])
    kernels.join_experts[_gated_grid(*out.shape)](
        outputs, places, ends, shares, out, *sizes, BLOCK=_GATED_BLOCK
    )
    return out


def vocab_sums(
    table: Tensor,
    logits: Tensor,
    targets: Tensor,
    ref_logits: Tensor | None,
    first: int,
    valid: int,
    scale: float,
    entropy: bool,
    squares: bool,
    forward: bool,
) -> None:
    """Write all rows of `mrlhf.parallel.vocab_sums.LocalSums`, also those not asked for.

    `table` is float32 [8, tokens], dense in its rows; logits are [tokens, columns].
    """
    if len(logits):
        kernels.vocab_sums[(len(logits),)](
            table, logits, targets, ref_logits, first, valid, logits.shape[1], table.stride(0),
            scale, COLUMNS=_COLUMNS, FORWARD=forward,
        )  # fmt: skip


def vocab_gradient(
    logits: Tensor,
    targets: Tensor,
    ref_logits: Tensor | None,
    log_total: Tensor,
    ref_log_total: Tensor,
    entropy: Tensor | None,
    kl: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_kl: Tensor | None,
    first: int,
    valid: int,
    scale: float,
    beta: float,
) -> None:
    """Write `mrlhf.parallel.vocab_sums.write_gradient` over the logits [tokens, columns].

    Gradients and the numbers that they are of are float32 [tokens]; gradients may be views.
    """
    rows, columns = logits.shape
    if rows:
        gradients = (
            None if gradient is None else gradient.contiguous()
            for gradient in (grad_logprobs, grad_entropy, grad_kl)
        )
        kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "mixture")
        kernels.vocab_gradient[(rows, triton.cdiv(columns, _COLUMNS))](
            logits, targets, ref_logits, log_total, ref_log_total, entropy, kl, *gradients,
            first, valid, columns, scale, beta, COLUMNS=_COLUMNS, KIND=kind,
        )  # fmt: skip


def _warps(block: int) -> int:
    """Warps of a program that holds a row of `block` numbers."""
    return min(16, max(1, block // 512))


def delta_step(
    qkvz: Tensor, ba: Tensor, taps: Tensor, log_rate: Tensor, bias: Tensor, norm: Tensor,
    eps: float, slots: Tensor, lengths: Tensor, windows: Tensor, states: Tensor,
) -> Tensor:  # fmt: skip
    """Let one token of each sequence through a gated delta net; states and windows are overwritten.

    Args:
        qkvz: [sequences, channels]: for each key head its q, its k, and v and z of its value heads.
        ba: [sequences, 2 * value_heads]: for each key head b and a of its value heads.
        taps: weight of the convolution, [channels, 1, taps].
        log_rate: A_log, [value_heads]; `bias`, dt_bias, is shaped as it.
        norm: weight of the norm of outputs, [value_dim].
        eps: added to the mean square in it.
        slots: where states and windows of each sequence lie, int64 [sequences].
        lengths: tokens of each sequence, with this one; one that has no other begins with zeros.
        windows: the rows that the convolution still sees, [slots, taps - 1, channels].
        states: float32 [slots, value_heads, key_dim, value_dim].

    Returns:
        The gated outputs, [sequences, value_heads * value_dim].
    """
    _, value_heads, key_dim, value_dim = states.shape
    key_heads = (qkvz.shape[1] - 2 * value_heads * value_dim) // (2 * key_dim)
    out = qkvz.new_empty(len(qkvz), value_heads * value_dim)
    keys, values = (triton.next_power_of_2(dim) for dim in (key_dim, value_dim))
    delta_kernels.delta_step[(len(qkvz), key_heads)](
        qkvz, ba, taps, log_rate, bias, norm, slots, lengths, windows, states, out,
        eps, key_dim**-0.5, value_heads // key_heads, key_dim, value_dim,
        TAPS=taps.shape[2], KEYS=keys, VALUES=values, num_warps=8 if keys * values > 4096 else 4,
    )  # fmt: skip
    return out
