"""The gated delta rule on torch's operators, for training and the engine.

A head's state S, [key_dim, value_dim], goes through the tokens of a sequence: with decay a, rate b,
key k, value v and query q, S becomes a S + b k (v - a k S), and the output is q S
(https://arxiv.org/abs/2412.06464). Chunks of tokens are computed together, as in transformers. All
is float32. This file knows sequences laid end to end, and neither layers nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.device import send
from mrlhf.models.ops import rms_norm
from mrlhf.models.spec import DELTA_CHUNK, DeltaNet

_EPS = 1e-6  # added to the square of the length of a query or key


@dataclass(frozen=True)
class Gates:
    """What a token does to the states of each value head, float32 [tokens, value_heads] each."""

    log_decay: Tensor
    rate: Tensor


def split_projections(net: DeltaNet, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the channels of the convolution, [tokens, channels], z and the numbers for the gates.

    `qkvz` and `ba` have, for each key head of this rank, its q, its k, and v and z of its value
    heads; and b and a of these. z is [tokens, value_heads, value_dim], the last [tokens,
    value_heads, 2]: b, then a.
    """
    shared = net.value_heads // net.key_heads
    values = shared * net.value_dim
    heads = qkvz.unflatten(-1, (-1, 2 * net.key_dim + 2 * values))
    *qkv, z = heads.split([net.key_dim, net.key_dim, values, values], dim=-1)
    channels = torch.cat([part.flatten(1) for part in qkv], dim=-1)
    gates = ba.unflatten(-1, (-1, 2, shared)).transpose(-1, -2).flatten(1, 2)
    return channels, z.reshape(len(z), -1, net.value_dim), gates


def gates_of(numbers: Tensor, log_rate: Tensor, bias: Tensor) -> Gates:
    """Return the gates from [tokens, value_heads, 2]; the others are A_log and dt_bias."""
    b, a = numbers.unbind(-1)
    log_decay = -log_rate.float().exp() * F.softplus(a.float() + bias)
    return Gates(log_decay, b.sigmoid().float())


def convolve(x: Tensor, weight: Tensor, pasts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Return silu of the causal convolution of each channel of x [tokens, channels].

    Args:
        weight: [channels, 1, taps].
        pasts: for each sequence the `taps - 1` rows before its first token; zeros at its beginning.
        lengths: tokens of each sequence, 1 or more.
    """
    before = weight.shape[-1] - 1
    rows = [part for pair in zip(pasts, x.split(list(lengths)), strict=True) for part in pair]
    outputs = F.conv1d(torch.cat(rows).t()[None], weight, groups=len(weight))[0].t()
    # Between two sequences lie outputs that see both.
    sizes = [size for length in lengths for size in (length, before)][:-1]
    return F.silu(torch.cat(outputs.split(sizes)[::2]))


def heads_of(net: DeltaNet, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of each value head, float32 [tokens, value_heads, dim], from channels.

    q and k have length 1, but for the scale of q.
    """
    keys = channels.shape[-1] * net.key_size // net.channels
    q, k, v = channels.float().split([keys, keys, channels.shape[-1] - 2 * keys], dim=-1)
    q, k = (part.unflatten(-1, (-1, net.key_dim)) for part in (q, k))
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + _EPS) for part in (q, k))
    shared = net.value_heads // net.key_heads
    q, k = (part.repeat_interleave(shared, dim=1) for part in (q, k))
    return q * net.key_dim**-0.5, k, v.unflatten(-1, (-1, net.value_dim))


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x, times silu(z); all [tokens, value_heads, value_dim], in z's dtype."""
    normed = rms_norm(x.to(z.dtype), weight, eps)
    return (normed * F.silu(z.float())).to(z.dtype)


def one_token(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs and states after one token of each sequence; else as `chunked`."""
    states = states * gates.log_decay.exp()[..., None, None]
    known = (states * k[..., None]).sum(dim=-2)
    change = (v - known) * gates.rate[..., None]
    states = states + k[..., None] * change[..., None, :]
    return (states * q[..., None]).sum(dim=-2), states


@dataclass(frozen=True)
class Chunks:
    """Sequences laid end to end, each cut into chunks of which the last one is filled up.

    Turn by turn come the chunks of that number of all sequences that have one, which are the first
    of `order`.
    """

    size: int  # tokens of a chunk
    order: Tensor  # the sequences, those with most chunks first, int64 [sequences]
    turns: list[int]  # sequences that have a chunk of each number
    places: Tensor  # of each token among those of all chunks, int64 [tokens]

    @staticmethod
    @lru_cache(maxsize=2)  # all layers of a pass cut it alike, apart from prompts that are shared
    @torch.inference_mode(mode=False)  # a gradient may need the places
    def of_lengths(lengths: tuple[int, ...], device: torch.device) -> Chunks:
        """Cut sequences of these lengths, 1 or more."""
        size = min(DELTA_CHUNK, max(lengths))
        counts = [-(-length // size) for length in lengths]
        order = torch.tensor(sorted(range(len(lengths)), key=lambda number: -counts[number]))
        turns = [sum(count > turn for count in counts) for turn in range(max(counts))]
        firsts = torch.tensor([0, *accumulate(turns)])
        ranks = order.argsort().tolist()
        places = []
        for length, count, rank in zip(lengths, counts, ranks, strict=True):
            chunks = (firsts[:count, None] + rank) * size + torch.arange(size)
            places.append(chunks.flatten()[:length])
        return Chunks(size, send(order, device), turns, send(torch.cat(places), device))

    def of(self, x: Tensor) -> Tensor:
        """Return x [tokens, heads, ...] as [chunks, heads, size, ...], filled up with zeros."""
        padded = x.new_zeros((sum(self.turns) * self.size, *x.shape[1:]))
        return padded.index_copy(0, self.places, x).unflatten(0, (-1, self.size)).transpose(1, 2)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, chunks: Chunks, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the rule for whole sequences.

    Args:
        q: [tokens, heads, key_dim], as k; v is [tokens, heads, value_dim].
        states: before the first token of each sequence, [sequences, heads, key_dim, value_dim].

    Returns:
        The outputs, shaped as v, and the states after the last token of each sequence.
    """
    rate = gates.rate[..., None]
    q, k, k_rated, v_rated = (chunks.of(x) for x in (q, k, k * rate, v * rate))
    decay = chunks.of(gates.log_decay).cumsum(dim=-1)

    # Within a chunk, what each token adds depends on the ones before it: a triangular system.
    between = decay[..., :, None] - decay[..., None, :]
    above = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(above, float("-inf")).exp()
    system = (k_rated @ k.transpose(-1, -2)) * between
    seen = (q @ k.transpose(-1, -2)) * between
    wanted = torch.cat([v_rated, k_rated * decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, of_states = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    q = q * decay.exp()[..., None]
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    whole = decay[..., -1, None, None].exp()
    # The gradient of a split is one tensor; those of parts taken one by one would be as many.
    parts = (x.split(chunks.turns) for x in (q, k, seen, values, of_states, whole))
    states = states[chunks.order]
    outputs = []
    ended = []
    for q_now, k_now, seen_now, value, of_state, kept in zip(*parts, strict=True):
        if len(q_now) < len(states):
            states, others = states.split([len(q_now), len(states) - len(q_now)])
            ended.append(others)
        added = value - of_state @ states
        outputs.append(q_now @ states + seen_now @ added)
        states = states * kept + k_now.transpose(-1, -2) @ added

    tokens = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    states = torch.cat([states, *reversed(ended)])[chunks.order.argsort()]
    return tokens[chunks.places], states


def chunked_parts(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, lengths: Sequence[int], before: Sequence[int]
) -> Tensor:
    """Compute the rule for sequences of which some go on where others end; return the outputs.

    Args:
        q: as in `chunked`, with k, v and gates.
        lengths: tokens of each part of a sequence.
        before: for each part, the one after which it goes on, itself with none before; -1: none.
    """
    firsts = [part for part, other in enumerate(before) if other < 0]
    others = [part for part, other in enumerate(before) if other >= 0]
    empty = v.new_zeros((len(firsts), v.shape[1], k.shape[-1], v.shape[-1]))
    if not others:
        return chunked(q, k, v, gates, Chunks.of_lengths(tuple(lengths), q.device), empty)[0]
    places = torch.arange(len(q), device=q.device).split(list(lengths))

    def compute(parts: Sequence[int], states: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.cat([places[part] for part in parts])
        own_gates = Gates(gates.log_decay[own], gates.rate[own])
        chunks = Chunks.of_lengths(tuple(lengths[part] for part in parts), q.device)
        return chunked(q[own], k[own], v[own], own_gates, chunks, states)

    outputs, states = compute(firsts, empty)
    numbers = send(torch.tensor([firsts.index(before[part]) for part in others]), q.device)
    rests, _ = compute(others, states[numbers])
    order = torch.cat([places[part] for part in (*firsts, *others)])
    return torch.cat([outputs, rests])[order.argsort()]
