"""Triton kernels of a decoder layer's steps besides its matrix products and what mixes tokens.

Each is a torch form of `operators` in one pass over memory. Arithmetic is float32, and a result is
rounded where the torch form rounds it. This file knows pointers and sizes.

Triton compiles a kernel anew where a number becomes 1 or divisible by 16, or a tensor begins at
another multiple of 16 bytes; for what `_VARYING` names it does not look, so one form serves a run.
"""

from __future__ import annotations

import triton
import triton.language as tl

_VARYING = (
    # differ between calls, or layers
    "rows", "table_stride", "group", "first",
    # are parts of a larger tensor; single numbers are read of most
    "positions", "places", "uniform", "logprobs", "targets", "table", "log_total", "ref_log_total",
    "entropy", "kl", "grad_logprobs", "grad_entropy", "grad_kl", "entries",
)  # fmt: skip
_kernel = triton.jit(do_not_specialize=_VARYING)


@_kernel
def add_rms_norm(
    hidden, delta, weight, out, scales, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """hidden += delta; out = weight * hidden / rms(hidden); one program a row of `size` numbers.

    A wider weight multiplies numbers that are not rounded yet.
    """
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty

    x = tl.load(hidden + row + columns, inside, 0.0).to(tl.float32)
    if ADDS:
        x += tl.load(delta + row + columns, inside, 0.0).to(tl.float32)
        tl.store(hidden + row + columns, x.to(dtype), inside)
        x = x.to(dtype).to(tl.float32)  # what was stored is what is normalised
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    if scales is not None:
        tl.store(scales + tl.program_id(0), scale)
    gain = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    normal = (x * scale).to(weight.dtype.element_ty).to(tl.float32)
    tl.store(out + row + columns, (normal * gain).to(dtype), inside)


@_kernel
def rms_norm_backward(
    grad, x, weight, scales, grad_x, grad_weights, rows, size,
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of EACH rows a program; `grad_weights` [programs, size] are parts of a sum."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gain = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], tl.float32)

    for step in range(EACH):
        row = program.to(tl.int64) * EACH + step
        here = columns < tl.where(row < rows, size, 0)
        place = row * size + columns
        above = tl.load(grad + place, here, 0.0).to(tl.float32)
        scale = tl.load(scales + tl.minimum(row, rows - 1))
        normal = tl.load(x + place, here, 0.0).to(tl.float32) * scale
        of_weight += above * normal
        scaled = above * gain
        below = scale * (scaled - normal * (tl.sum(scaled * normal, 0) / size))
        tl.store(grad_x + place, below.to(grad_x.dtype.element_ty), here)
    tl.store(grad_weights + program.to(tl.int64) * size + columns, of_weight, inside)


@_kernel
def gated(gate_up, out, size, BLOCK: tl.constexpr):
    """out [rows, size] = silu(gate) * up of gate_up [rows, 2 * size]; a program a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty

    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, inside, 0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * size + columns, (active * up).to(dtype), inside)


@_kernel
def gated_backward(grad, gate_up, grad_gate_up, size, BLOCK: tl.constexpr):
    """The gradient of `gated`, laid out as `gate_up`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = grad_gate_up.dtype.element_ty
    first = row * 2 * size + columns

    above = tl.load(grad + row * size + columns, inside, 0.0).to(tl.float32)
    gate = tl.load(gate_up + first, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + first + size, inside, 0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = above * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_up + first, of_gate.to(dtype), inside)
    tl.store(grad_gate_up + first + size, (above * gate * sigmoid).to(dtype), inside)


@triton.jit
def _rotated(x, other, cosine, sine, half, lanes):
    """Numbers `lanes` of a head after rotation; `other` are those of the other half."""
    turned = tl.where(lanes < half, x * cosine - other * sine, x * cosine + other * sine)
    return tl.where(lanes < 2 * half, turned, x)


@_kernel
def rotate(
    x, cosines, sines, out, group, dim, half, token_stride, outer_stride, inner_stride, sign,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate each head of x [tokens, heads / group, group, dim]; `sign` -1 rotates back."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < dim
    turns = lanes < 2 * half
    source = x + token * token_stride + head // group * outer_stride + head % group * inner_stride
    partner = tl.where(lanes < half, lanes + half, lanes - half)

    own = tl.load(source + lanes, inside, 0.0).to(tl.float32)
    other = tl.load(source + partner, turns, 0.0).to(tl.float32)
    cosine = tl.load(cosines + token * half + lanes % half, turns, 1.0)
    sine = tl.load(sines + token * half + lanes % half, turns, 0.0) * sign
    turned = _rotated(own, other, cosine, sine, half, lanes)
    place = (token * tl.num_programs(1) + head) * dim
    tl.store(out + place + lanes, turned.to(out.dtype.element_ty), inside)


@_kernel
def rotate_store(
    qkv, q_norm, k_norm, cosines, sines, positions, places, q, keys, values,
    kv_heads, dim, half, eps,
    GROUP: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of one head of q or k, or a copy of v; k and v go to the cache.

    qkv is [tokens, kv_heads, GROUP + 2, dim], and a program computes one of its rows of `dim`.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // (GROUP + 2)
    member = tl.program_id(1) % (GROUP + 2)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < dim
    turns = lanes < 2 * half
    dtype = q.dtype.element_ty

    source = qkv + ((token * kv_heads + kv_head) * (GROUP + 2) + member) * dim
    cached = (tl.load(places + token) * kv_heads + kv_head) * dim + lanes
    own = tl.load(source + lanes, inside, 0.0).to(tl.float32)
    if member == GROUP + 1:
        tl.store(values + cached, own.to(dtype), inside)
    else:
        partner = tl.where(lanes < half, lanes + half, lanes - half)
        other = tl.load(source + partner, turns, 0.0).to(tl.float32)
        if NORMS:
            norm = q_norm if member < GROUP else k_norm
            scale = 1.0 / tl.sqrt(tl.sum(own * own, 0) / dim + eps)
            gain = tl.load(norm + lanes, inside, 0.0).to(tl.float32)
            other_gain = tl.load(norm + partner, turns, 0.0).to(tl.float32)
            wide = q_norm.dtype.element_ty
            own = ((own * scale).to(wide).to(tl.float32) * gain).to(dtype).to(tl.float32)
            other = ((other * scale).to(wide).to(tl.float32) * other_gain).to(dtype).to(tl.float32)

        position = tl.load(positions + token)
        cosine = tl.load(cosines + position * half + lanes % half, turns, 1.0)
        sine = tl.load(sines + position * half + lanes % half, turns, 0.0)
        turned = _rotated(own, other, cosine, sine, half, lanes).to(dtype)
        if member == GROUP:
            tl.store(keys + cached, turned, inside)
        else:
            place = ((token * kv_heads + kv_head) * GROUP + member) * dim
            tl.store(q + place + lanes, turned, inside)


@_kernel
def logit_blocks(logits, summaries, columns, stride, factor, COLUMNS: tl.constexpr):
    """Of each block of COLUMNS scaled logits: the highest, and after those of all rows the sums."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    places = block * COLUMNS + tl.arange(0, COLUMNS)
    loaded = tl.load(logits + row * stride + places, places < columns, 0.0).to(tl.float32) * factor
    scaled = tl.where(places < columns, loaded, -float("inf"))

    top = tl.max(scaled, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    mine = summaries + row * blocks + block
    tl.store(mine, top)
    tl.store(mine + tl.num_programs(0) * blocks, tl.sum(tl.exp(scaled - safe), 0))


@_kernel
def draw(
    logits, summaries, uniform, tokens, logprobs, columns, blocks, ranks, rank, first, stride,
    factor, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Draw a token of each row: all ranks find its block, and that block's rank the column."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    number = tl.load(uniform + row)
    index = tl.arange(0, BLOCKS)
    inside = index < ranks * blocks
    place = (index // blocks * 2 * rows + row) * blocks + index % blocks
    top_of = tl.load(summaries + place, inside, -float("inf"))
    top = tl.max(top_of, 0)
    sum_of = tl.load(summaries + place + rows * blocks, inside, 0.0).to(tl.float64)
    mass = tl.exp((top_of - top).to(tl.float64)) * sum_of
    total = tl.sum(mass, 0)
    ends = tl.cumsum(mass, 0)

    # The first block whose end is above the target; if rounding puts it past all, the last of any.
    target = number * total
    last = tl.max(tl.where(mass > 0, index, 0), 0)
    block = tl.minimum(tl.sum((inside & (ends <= target)).to(tl.int32), 0), last)
    if number < 0:
        block = tl.minimum(tl.argmax(top_of, 0), ranks * blocks - 1)
    before = tl.sum(tl.where(index < block, mass, 0.0), 0)

    lanes = tl.arange(0, COLUMNS)
    places = block % blocks * COLUMNS + lanes
    real = places < tl.where(block // blocks == rank, columns, 0)
    loaded = tl.load(logits + row * stride + places, real, 0.0).to(tl.float32) * factor
    weights = tl.where(real, tl.exp((loaded - top).to(tl.float64)), 0.0)
    within = before + tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, lanes, 0), 0)
    lane = tl.minimum(tl.sum((real & (within <= target)).to(tl.int32), 0), last)
    if number < 0:
        lane = tl.argmax(tl.where(real, loaded, -float("inf")), 0)

    # Of numbers that are none argmax may be any lane, and the next pass takes the token.
    column = tl.minimum(block % blocks * COLUMNS + lane, columns - 1)
    chosen = tl.sum(tl.where(lanes == lane, loaded, 0.0), 0)
    logprob = (chosen - top) - tl.log(total).to(tl.float32)
    mine = block // blocks == rank
    tl.store(tokens + row, tl.where(mine, first + column, 0).to(tl.int64))
    tl.store(logprobs + row, tl.where(mine, logprob, 0.0))


@_kernel
def sort_by_expert(
    chosen, tokens, places, ends, entries, per_token, first, count, BLOCK: tl.constexpr
):
    """Where the rows of one expert lie, and of which tokens they are; `count` stands for others."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    place = 0
    for begin in range(0, entries, BLOCK):
        number = tl.load(chosen + begin + lanes, begin + lanes < entries, -1) - first
        place += tl.sum(((number >= 0) & (number < expert)).to(tl.int32), 0)

    for begin in range(0, entries, BLOCK):
        inside = begin + lanes < entries
        number = tl.load(chosen + begin + lanes, inside, -1) - first
        number = tl.where((number >= 0) & (number < count), number, count)
        mine = inside & (number == expert)
        after = place + tl.cumsum(mine.to(tl.int32), 0)
        tl.store(tokens + after - 1, (begin + lanes) // per_token, mine)
        tl.store(places + begin + lanes, after - 1, mine)
        place += tl.sum(mine.to(tl.int32), 0)
    if expert < count:
        tl.store(ends + expert, place)


@_kernel
def join_experts(outputs, places, ends, shares, out, per_token, count, size, BLOCK: tl.constexpr):
    """out [tokens, size]: the sum of a token's outputs that lie before the last end, by shares."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(ends + count - 1)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(per_token):
        place = tl.load(places + token * per_token + choice)
        share = tl.load(shares + token * per_token + choice)
        here = columns < tl.where(place < held, size, 0)
        output = tl.load(outputs + place.to(tl.int64) * size + columns, here, 0.0)
        total += share * output.to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), columns < size)


@_kernel
def vocab_sums(
    table, logits, targets, ref_logits, first, valid, stride, table_stride, scale,
    COLUMNS: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """The sums of one row of logits, read once: they are kept relative to the highest so far."""
    row = tl.program_id(0).to(tl.int64)
    top = -1e30
    total = 0.0
    weighted = 0.0
    squares = 0.0
    ref_top = -1e30
    ref_total = 0.0
    difference = 0.0

    for begin in range(0, valid, COLUMNS):
        places = begin + tl.arange(0, COLUMNS)
        inside = places < valid
        x = tl.load(logits + row * stride + places, inside, 0.0).to(tl.float32) * scale
        above = tl.maximum(top, tl.max(tl.where(inside, x, -1e30), 0))
        moved = top - above
        shrunk = tl.exp(moved)
        x = tl.where(inside, x - above, 0.0)
        weight = tl.where(inside, tl.exp(x), 0.0)
        if ref_logits is not None:
            y = tl.load(ref_logits + row * stride + places, inside, 0.0).to(tl.float32) * scale
            ref_above = tl.maximum(ref_top, tl.max(tl.where(inside, y, -1e30), 0))
            ref_moved = ref_top - ref_above
            y = tl.where(inside, y - ref_above, 0.0)
            ref_shrunk = tl.exp(ref_moved)
            ref_weight = tl.where(inside, tl.exp(y), 0.0)
            if FORWARD:
                difference += (ref_moved - moved) * ref_total
                difference = difference * ref_shrunk + tl.sum(ref_weight * (y - x), 0)
            else:
                difference += (moved - ref_moved) * total
                difference = difference * shrunk + tl.sum(weight * (x - y), 0)
            ref_total = ref_total * ref_shrunk + tl.sum(ref_weight, 0)
            ref_top = ref_above
        weighted = (weighted + moved * total) * shrunk + tl.sum(weight * x, 0)
        squares = squares * shrunk * shrunk + tl.sum(weight * weight, 0)
        total = total * shrunk + tl.sum(weight, 0)
        top = above

    local = tl.load(targets + row) - first
    is_local = (local >= 0) & (local < valid)
    at_target = tl.load(logits + row * stride + local, is_local, 0.0).to(tl.float32) * scale
    # In the order of the rows of `LocalSums`.
    tl.store(table + row, top)
    tl.store(table + table_stride + row, total)
    tl.store(table + 2 * table_stride + row, at_target)
    tl.store(table + 3 * table_stride + row, weighted)
    tl.store(table + 4 * table_stride + row, squares)
    if ref_logits is not None:
        tl.store(table + 5 * table_stride + row, ref_top)
        tl.store(table + 6 * table_stride + row, ref_total)
        tl.store(table + 7 * table_stride + row, difference)


@_kernel
def vocab_gradient(
    logits, targets, ref_logits, log_total, ref_log_total, entropy, kl,
    grad_logprobs, grad_entropy, grad_kl, first, valid, columns, scale, beta,
    COLUMNS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write the gradient over a part of a row of logits, and zeros over padding."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = places < valid
    mine = logits + row * columns + places

    x = tl.load(mine, inside, 0.0).to(tl.float32) * scale - tl.load(log_total + row)
    p = tl.exp(x)
    is_target = places == tl.load(targets + row) - first
    below = tl.load(grad_logprobs + row) * (tl.where(is_target, 1.0, 0.0) - p)
    if grad_entropy is not None:
        below -= tl.load(grad_entropy + row) * p * (x + tl.load(entropy + row))
    if grad_kl is not None:
        y = tl.load(ref_logits + row * columns + places, inside, 0.0).to(tl.float32) * scale
        y -= tl.load(ref_log_total + row)
        if KIND == "forward":
            slope = p - tl.exp(y)
        elif KIND == "reverse":
            slope = p * (x - y - tl.load(kl + row))
        else:
            above = tl.maximum(x, y)
            mixed = above + tl.log(beta * tl.exp(y - above) + (1 - beta) * tl.exp(x - above))
            slope = (1 - beta) * p * (x - mixed - tl.load(kl + row))
        below += tl.load(grad_kl + row) * slope
    result = tl.where(inside, below * scale, 0.0).to(logits.dtype.element_ty)
    tl.store(mine, result, places < columns)
