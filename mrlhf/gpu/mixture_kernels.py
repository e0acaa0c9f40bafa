"""Triton kernels of a mixture of experts besides its matrix products, as `kernels` has for layers.

This file knows pointers and sizes.
"""

from __future__ import annotations

import triton.language as tl

from mrlhf.gpu.kernels import kernel


@kernel
def choose_experts(
    logits, correction, chosen, shares, per_token, kept, groups, size, scale,
    SOFTMAX: tl.constexpr, NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """The experts of one token, and their shares; they are in `groups` of `size` experts."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    numbers = group[:, None] * size + member[None, :]
    real = (group < groups)[:, None] & (member < size)[None, :]
    x = tl.load(logits + row * groups * size + numbers, real, -float("inf")).to(tl.float32)
    if SOFTMAX:
        weights = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = weights / tl.sum(tl.sum(weights, 1), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-x))

    wanted = scores
    if correction is not None:
        wanted += tl.load(correction + numbers, real, 0.0)
    wanted = tl.where(wanted == wanted, wanted, float("inf"))  # what is no number is chosen
    wanted = tl.where(real, wanted, -float("inf"))
    if GROUPS > 1:  # only those of the groups whose best two experts have the highest sums
        best = tl.max(wanted, 1)
        first = tl.min(tl.where(wanted == best[:, None], member[None, :], SIZE), 1)
        others = tl.where(member[None, :] == first[:, None], -float("inf"), wanted)
        good = best + tl.max(others, 1)
        allowed = group < 0
        for _ in range(kept):
            top = tl.min(tl.where(good == tl.max(good, 0), group, GROUPS), 0)
            allowed = allowed | (group == top)
            good = tl.where(group == top, -float("inf"), good)
        wanted = tl.where(allowed[:, None], wanted, -float("inf"))

    choices = tl.arange(0, CHOICES)
    experts = tl.zeros([CHOICES], tl.int64)
    given = tl.zeros([CHOICES], tl.float32)
    for choice in range(per_token):
        is_top = wanted == tl.max(tl.max(wanted, 1), 0)
        top = tl.min(tl.min(tl.where(is_top, numbers, groups * size - 1), 1), 0)
        score = tl.sum(tl.sum(tl.where(real & (numbers == top), scores, 0.0), 1), 0)
        experts = tl.where(choices == choice, top, experts)
        given = tl.where(choices == choice, score, given)
        wanted = tl.where(numbers == top, -float("inf"), wanted)

    if NORMALISED:
        given = given / (tl.sum(given, 0) + 1e-20)
    place = row * per_token + choices
    tl.store(chosen + place, experts, choices < per_token)
    tl.store(shares + place, given * scale, choices < per_token)


@kernel
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


@kernel
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
