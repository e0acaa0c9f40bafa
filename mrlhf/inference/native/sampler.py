"""Which token comes next: a uniform number that is a hash of what is sampled, and the inverse of the distribution.

The number depends on (seed, uid, sample index, position) and on nothing else, so batch order, replica and layout cannot
change a response, except where they round the logits differently. It knows neither models nor sequences, only rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.base import SamplingParams

_VOCAB_BLOCK = 128
# Rows are worked on together as long as the logits fit in a core's cache, or leave a device some memory.
_HOST_ELEMENTS = 2**19
_DEVICE_ELEMENTS = 2**27


def _signed(constant: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return constant - 2**64 if constant >= 2**63 else constant


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = _signed(0x94D049BB133111EB)


def splitmix64(state: Tensor) -> Tensor:
    """The output of SplitMix64 in each int64 `state` (Steele, Lea and Flood, OOPSLA 2014), modulo 2**64."""
    mixed = state + _GAMMA
    mixed = (mixed ^ _shift(mixed, 30)) * _FIRST_MULTIPLIER
    mixed = (mixed ^ _shift(mixed, 27)) * _SECOND_MULTIPLIER
    return mixed ^ _shift(mixed, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def sample_keys(seed: int, uids: Sequence[int], n: int, device: torch.device) -> Tensor:
    """One hash a sample, of (seed, uid, sample index): int64 [prompts * n], ordered by prompt, then by sample."""
    root = splitmix64(torch.tensor(seed, dtype=torch.int64, device=device))
    prompts = splitmix64(root ^ torch.tensor(list(uids), dtype=torch.int64, device=device))
    samples = torch.arange(n, dtype=torch.int64, device=device)
    return splitmix64(prompts[:, None] ^ samples).flatten()


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """The float64 [batch] in [0, 1), 53 bits each, for token `positions` [batch] of the samples with these `keys`."""
    return _shift(splitmix64(keys ^ positions), 11).to(torch.float64) * 2.0**-53


def sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: [batch, vocab], any float dtype; not altered.
        uniform: float64 [batch] in [0, 1); not looked at when greedy.
        sampling: temperature, top_k and top_p are used.

    Returns:
        int64 [batch] tokens, and float32 [batch] log-probabilities over the whole vocabulary at the temperature.
    """
    elements = _HOST_ELEMENTS if logits.device.type == "cpu" else _DEVICE_ELEMENTS
    rows = max(1, elements // logits.shape[-1])
    parts = [_sample_rows(*part, sampling) for part in zip(logits.split(rows), uniform.split(rows), strict=True)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample_rows(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    greedy = sampling.temperature == 0
    scaled = logits.float() if greedy or sampling.temperature == 1 else logits.float() / sampling.temperature
    highest, likeliest = scaled.max(dim=-1, keepdim=True)
    shifted = scaled - highest
    weights = shifted.exp()
    normaliser = weights.sum(dim=-1).log()
    tokens = likeliest[:, 0] if greedy else invert(truncate(weights, sampling.top_k, sampling.top_p), uniform)
    return tokens, shifted.gather(-1, tokens[:, None])[:, 0] - normaliser


def truncate(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """`weights` [batch, vocab] (unnormalised probabilities), zero outside top-k, then outside top-p of what is left.

    A token stays in top-p if those likelier than it, or as likely with a lower id, have less than `top_p` together.
    """
    if 0 < top_k < weights.shape[-1]:
        kth = weights.topk(top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(weights < kth, 0.0)
    if top_p < 1:
        ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
        cumulative = ordered.to(torch.float64).cumsum(dim=-1)
        dropped = cumulative - ordered >= top_p * cumulative[:, -1:]
        dropped[:, 0] = False
        weights = weights.masked_fill(dropped.scatter(-1, ids, dropped), 0.0)
    return weights


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token id at which the cumulative share of `weights` [batch, vocab] exceeds `uniform` [batch].

    Sums are float64. They are taken over blocks of the vocabulary first, so that no float64 copy of it is made.
    """
    size = min(_VOCAB_BLOCK, weights.shape[-1])
    blocks = F.pad(weights, (0, -weights.shape[-1] % size)).unflatten(-1, (-1, size))
    by_block = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    block, before = _first_above(by_block, uniform[:, None] * by_block[:, -1:])
    within = blocks.take_along_dim(block[:, :, None], dim=1)[:, 0].to(torch.float64).cumsum(dim=-1) + before
    token, _ = _first_above(within, uniform[:, None] * by_block[:, -1:])
    return (block * size + token)[:, 0].clamp_max(weights.shape[-1] - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Index [batch, 1] of the first entry above `target` [batch, 1], and the entry before it (0 before the first).

    Where rounding has put the target past the end, the last entry that adds anything is taken; not-a-number takes the
    last index.
    """
    end = cumulative[:, -1:]
    inside = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    index = torch.searchsorted(cumulative, inside, right=True).clamp_max(cumulative.shape[-1] - 1)
    before = cumulative.gather(-1, (index - 1).clamp_min(0)).masked_fill(index == 0, 0.0)
    return index, before
