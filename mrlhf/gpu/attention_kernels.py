"""The Triton kernels of the engine's attention to keys in pages.

Arithmetic is float32, and a result is rounded where the torch form rounds it. This file knows
pointers and sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As in `kernels`, one form serves all values of these, which differ between calls or layers, or are
# parts of a larger tensor of which single numbers are read.
_VARYING = (
    "rows", "sequences", "splits", "table_stride", "window",
    "tables", "query_starts", "lengths", "sinks", "sums", "tops",
)  # fmt: skip
_kernel = triton.jit(do_not_specialize=_VARYING)


@triton.jit
def _sequence_of(block, query_starts, sequences, QUERIES: tl.constexpr):
    """The sequence that holds query block `block`, where each may begin a block of its own."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _query_block(block, query_starts, sequences, QUERIES: tl.constexpr):
    """The sequence of a block of QUERIES tokens, and its first token."""
    if QUERIES == 1:
        sequence = block
        first = block
    else:
        sequence = _sequence_of(block, query_starts, sequences, QUERIES)
        begin = tl.load(query_starts + sequence)
        first = begin + (block - begin // QUERIES - sequence) * QUERIES
    return sequence, first


@triton.jit
def _add_keys(scores, value, top, total, context):
    """One more block of keys in a softmax: its highest score, its sum, and the weighted values."""
    higher = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp(scores - safe[:, None])
    shrunk = tl.exp(top - safe)
    total = total * shrunk + tl.sum(weights, 1)
    context = context * shrunk[:, None]
    context += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total, context


@_kernel
def paged_attention(
    q, keys, values, tables, query_starts, lengths, sinks, out, parts, sums, tops,
    sequences, kv_heads, dim, more, key_stride, table_stride, scale, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, MORE: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Causal attention of QUERIES tokens x HEADS of a GROUP to its KV head's keys in pages.

    These heads share one reading of the keys. With MORE, as in latent attention, keys have `more`
    numbers after their first `dim`, which are the values; from one to the next it is `key_stride`
    numbers. With several splits, the grid's last size, a program sees one part of the keys, and
    instead of `out` it writes float32 `parts` [splits, tokens, heads, dim], not yet divided by
    `sums`.
    """
    BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    block = tl.program_id(0) // BLOCKS  # programs that read the same keys are neighbours
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    sequence, first = _query_block(block, query_starts, sequences, QUERIES)
    end = tl.load(query_starts + sequence + 1)
    if first >= end:
        return

    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, DIM)
    tokens = first + rows // HEADS
    members = tl.program_id(0) % BLOCKS * HEADS + rows % HEADS
    heads = kv_head * GROUP + members
    real = (rows < QUERIES * HEADS) & (members < GROUP) & (tokens < end)
    length = tl.load(lengths + sequence)
    positions = length - end + tokens  # of each row in its sequence

    row = tokens.to(tl.int64) * kv_heads * GROUP + heads
    wanted = real[:, None] & (lanes < dim)[None, :]
    width = dim + more
    queries = tl.load(q + (row * width)[:, None] + lanes[None, :], wanted, 0.0)
    if MORE > 0:
        others = tl.arange(0, MORE)
        further = (row * width + dim)[:, None] + others[None, :]
        further_queries = tl.load(q + further, real[:, None] & (others < more)[None, :], 0.0)

    # The keys that any of these rows sees, and of these the part of this split.
    stop = tl.minimum(length, length - end + first + QUERIES)
    start = 0
    if window > 0:
        start = tl.maximum(0, length - end + first - window + 1) // KEYS * KEYS
    part = tl.cdiv(tl.cdiv(stop - start, KEYS), splits) * KEYS
    start += split * part
    stop = tl.minimum(stop, start + part)

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([ROWS, DIM], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for base in range(start, stop, KEYS):
        seen = base + tl.arange(0, KEYS)
        if PAGE % KEYS == 0:
            page = tl.load(table + base // PAGE)
        else:
            page = tl.load(table + seen // PAGE, seen < stop, 0)
        cached = ((page.to(tl.int64) * PAGE + seen % PAGE) * kv_heads + kv_head) * key_stride
        stored = (seen < stop)[:, None] & (lanes < dim)[None, :]
        key = tl.load(keys + cached[:, None] + lanes[None, :], stored, 0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee")
        if MORE > 0:
            value = key
            further_places = (cached + dim)[:, None] + others[None, :]
            further_stored = (seen < stop)[:, None] & (others < more)[None, :]
            further_key = tl.load(keys + further_places, further_stored, 0.0)
            scores = tl.dot(further_queries, tl.trans(further_key), scores, input_precision="ieee")
        else:
            value = tl.load(values + cached[:, None] + lanes[None, :], stored, 0.0)
        scores *= scale

        visible = (seen[None, :] <= positions[:, None]) & (seen < stop)[None, :]
        if window > 0:
            visible = visible & (seen[None, :] > positions[:, None] - window)
        if CAP > 0:  # tanh by the sigmoid
            scores = CAP * (2.0 * tl.sigmoid(2.0 * scores / CAP) - 1.0)
        scores = tl.where(visible, scores, -float("inf"))
        top, total, context = _add_keys(scores, value, top, total, context)

    if splits == 1:
        if sinks is not None:
            sink = tl.load(sinks + heads, real, 0.0).to(tl.float32)
            total += tl.where(real, tl.exp(sink - top), 0.0)
        # A row that sees nothing is padding, and gets zeros.
        context = context / tl.where(total > 0, total, 1.0)[:, None]
        places = (row * dim)[:, None] + lanes[None, :]
        tl.store(out + places, context.to(out.dtype.element_ty), wanted)
    else:
        size = tl.load(query_starts + sequences).to(tl.int64) * kv_heads * GROUP
        row += split * size
        tl.store(sums + row, total, real)
        tl.store(tops + row, top, real)
        tl.store(parts + (row * dim)[:, None] + lanes[None, :], context, wanted)


@_kernel
def join_splits(parts, sums, tops, sinks, out, rows, splits, heads, dim, DIM: tl.constexpr):
    """out [rows, dim] from the splits of `paged_attention`; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, DIM)
    inside = lanes < dim

    top = tl.load(tops + row)
    for split in range(1, splits):
        top = tl.maximum(top, tl.load(tops + split * rows + row))
    total = 0.0
    if sinks is not None:
        total += tl.exp(tl.load(sinks + row % heads).to(tl.float32) - top)
    context = tl.zeros([DIM], tl.float32)
    for split in range(splits):
        place = split * rows + row
        weight = tl.exp(tl.load(tops + place) - top)
        total += weight * tl.load(sums + place)
        context += weight * tl.load(parts + place * dim + lanes, inside, 0.0)
    tl.store(out + row * dim + lanes, (context / total).to(out.dtype.element_ty), inside)
