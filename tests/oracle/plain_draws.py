"""How an engine draws a token, in Python's unbounded integers and a loop over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mrlhf.inference.base import Sample, SamplingParams

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(state: int) -> int:
    """SplitMix64."""
    z = (state + GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def number(seed: int, uid: int, index: int, place: int) -> float:
    """The number in [0, 1) that picks the token at `place` of a response."""
    return (mix(mix(mix(mix(seed) ^ uid) ^ index) ^ place) >> 11) / 2**53


@torch.no_grad()
def worst_draw(
    model: Any,
    prompts: Sequence[Sequence[int]],
    uids: Sequence[int],
    samples: Sequence[Sample],
    sampling: SamplingParams,
    never: Sequence[int] = (),
) -> float:
    """By how much, at most, a number lies outside the share of the token that was drawn with it.

    The tokens that may be drawn have shares of [0, 1) in the order of their ids, as large as their
    probabilities. `sampling` has no top-p.
    """
    worst = 0.0
    for sample in samples:
        prompt = prompts[sample.request_id]
        uid = uids[sample.request_id]
        logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1]
        logits[:, list(never)] = -torch.inf
        for place, (token, row) in enumerate(zip(sample.token_ids, logits, strict=True)):
            weights = (row.double() / sampling.temperature).softmax(0)
            if sampling.top_k > 0:
                weights[weights < weights.sort(descending=True).values[sampling.top_k - 1]] = 0.0
            total = float(weights.sum())
            before = float(weights[:token].sum()) / total
            end = before + float(weights[token]) / total
            drawn_with = number(sampling.seed, uid, sample.sample_index, place)
            worst = max(worst, before - drawn_with, drawn_with - end)
    return worst
