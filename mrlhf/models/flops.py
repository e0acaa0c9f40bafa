"""Floating-point operations of a model, counted from its shape: what a forward pass and a training
step need.

Counted are matrix products, a multiplication and an addition each: every linear layer, the output
layer, and attention between the pairs of positions that see each other. The lookup of embeddings,
norms, rotation and softmax are not, nor what an implementation does twice (recomputed activations)
or in vain (masked pairs, padding): so divided by time and peak this is the model FLOPs utilisation
of https://arxiv.org/abs/2204.02311, appendix B. It knows neither devices nor layouts.
"""

from __future__ import annotations

from collections.abc import Iterable

from mrlhf.models.spec import ModelSpec

BACKWARD = 2
"""Matrix products of a backward pass for one of the forward pass: for the inputs, and for the weights."""


def forward_flops(spec: ModelSpec, length: int) -> int:
    """Operations of one forward pass over one sequence of `length` tokens, the output layer applied
    to each.
    """
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (queries + 2 * keys) + queries * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.ffn_size
    head = spec.hidden_size * (spec.vocab_size if spec.head == "lm" else 1)
    weights = spec.num_layers * (attention + mlp) + head
    scores = spec.num_layers * queries * visible_pairs(length, spec.sliding_window)
    return 2 * weights * length + 4 * scores


def training_flops(spec: ModelSpec, lengths: Iterable[int]) -> float:
    """Operations of one forward and backward pass over sequences of these `lengths`, in tokens."""
    return float((1 + BACKWARD) * sum(forward_flops(spec, length) for length in lengths))


def visible_pairs(length: int, window: int | None) -> int:
    """Pairs (query, key) of a causal sequence: token t, counted from 1, sees min(t, window) tokens,
    itself included.
    """
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen
