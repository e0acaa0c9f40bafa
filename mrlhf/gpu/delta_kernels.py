"""The Triton kernel of a gated delta net's step by one token of each sequence.

Arithmetic is float32, and a result is rounded where the torch form rounds it. This file knows
pointers and sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convolved(x, window, taps, channels, lanes, size, old, TAPS: tl.constexpr):
    """Silu of the convolution of `size` channels; `window` gets the rows that a next token sees.

    Of its rows `old` channels are read, which are all or none.
    """
    dtype = x.dtype.element_ty
    inside = lanes < size
    newest = tl.load(x + lanes, inside, 0.0)
    tap = tl.load(taps + lanes * TAPS + TAPS - 1, inside, 0.0).to(tl.float32)
    total = newest.to(tl.float32) * tap
    for step in tl.static_range(TAPS - 1):
        past = tl.load(window + step * channels + lanes, lanes < old, 0.0)
        tap = tl.load(taps + lanes * TAPS + step, inside, 0.0).to(tl.float32)
        total += past.to(tl.float32) * tap

    tl.debug_barrier()  # more threads read a channel than the one that writes it
    for step in tl.static_range(1, TAPS - 1):
        past = tl.load(window + step * channels + lanes, lanes < old, 0.0)
        tl.store(window + (step - 1) * channels + lanes, past, inside)
    if TAPS > 1:
        tl.store(window + (TAPS - 2) * channels + lanes, newest, inside)
    total = total.to(dtype).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)


# What these say may begin at other multiples of 16 bytes in each layer; one form serves all.
@triton.jit(do_not_specialize=("taps", "log_rate", "bias", "norm", "slots", "lengths"))
def delta_step(
    qkvz, ba, taps, log_rate, bias, norm, slots, lengths, windows, states, out,
    eps, scale, shared, key_dim, value_dim,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The states of one key head's value heads after one token, and their gated outputs.

    A program reads and writes each state once. A sequence of one token begins with zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_heads = tl.num_programs(1)
    dtype = out.dtype.element_ty
    slot = tl.load(slots + row)
    goes_on = tl.load(lengths + row) > 1

    key_lanes = tl.arange(0, KEYS)
    value_lanes = tl.arange(0, VALUES)
    of_value = value_lanes < value_dim
    inside = (key_lanes < key_dim)[:, None] & of_value[None, :]
    old_keys = tl.where(goes_on, key_dim, 0)
    old_values = tl.where(goes_on, value_dim, 0)
    seen = (key_lanes < old_keys)[:, None] & of_value[None, :]
    key_size = key_heads * key_dim
    channels = 2 * key_size + key_heads * shared * value_dim
    window = windows + slot * (TAPS - 1) * channels
    own = qkvz + (row * key_heads + head) * (2 * key_dim + 2 * shared * value_dim)
    numbers = ba + (row * key_heads + head) * 2 * shared

    place = head * key_dim
    q = _convolved(
        own, window + place, taps + place * TAPS, channels, key_lanes, key_dim, old_keys, TAPS
    )
    place = key_size + head * key_dim
    k = _convolved(
        own + key_dim, window + place, taps + place * TAPS, channels, key_lanes, key_dim,
        old_keys, TAPS,
    )  # fmt: skip
    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    gain = tl.load(norm + value_lanes, of_value, 0.0).to(tl.float32)

    for index in range(shared):
        value_head = head * shared + index
        place = 2 * key_size + value_head * value_dim
        v = _convolved(
            own + 2 * key_dim + index * value_dim, window + place, taps + place * TAPS, channels,
            value_lanes, value_dim, old_values, TAPS,
        )  # fmt: skip

        b = tl.load(numbers + index).to(tl.float32)
        a = tl.load(numbers + shared + index).to(tl.float32) + tl.load(bias + value_head)
        softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
        decay = tl.exp(-tl.exp(tl.load(log_rate + value_head).to(tl.float32)) * softplus)
        rate = (1.0 / (1.0 + tl.exp(-b))).to(dtype).to(tl.float32)

        stored = states + (slot * key_heads * shared + value_head) * key_dim * value_dim
        places = stored + key_lanes[:, None] * value_dim + value_lanes[None, :]
        state = tl.load(places, seen, 0.0) * decay
        change = (v - tl.sum(state * k[:, None], 0)) * rate
        state += k[:, None] * change[None, :]
        tl.store(places, state, inside)

        x = tl.sum(state * q[:, None], 0).to(dtype).to(tl.float32)
        normal = (x / tl.sqrt(tl.sum(x * x, 0) / value_dim + eps)).to(dtype).to(tl.float32)
        normal = (normal * gain).to(dtype).to(tl.float32)
        of_z = own + 2 * key_dim + (shared + index) * value_dim
        z = tl.load(of_z + value_lanes, of_value, 0.0).to(tl.float32)
        gated = normal * (z / (1.0 + tl.exp(-z)))
        result = out + (row * key_heads * shared + value_head) * value_dim
        tl.store(result + value_lanes, gated.to(dtype), of_value)
