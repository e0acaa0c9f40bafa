"""Counts the floating-point operations that a forward pass and a training step of a model need.

Matrix products count, with two operations for each multiplication and addition: every linear layer
(of experts those that a token goes to), the output layer at the positions whose output is used, and
attention between the pairs of positions that see each other; of a delta net its convolution, and
what changes and reads its states token by token. The lookup of embeddings, norms,
rotation and softmax do not count, nor does whatever an implementation does twice (recomputed
activations) or in vain (masked pairs, padding, outputs that nobody reads). Divided by time and by
the peak of the device, this is the model FLOPs utilisation of https://arxiv.org/abs/2204.02311,
appendix B.

The counts are those of Llama-like models. This file does not know devices or layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from mrlhf.models.attention_sizes import attention_layers
from mrlhf.models.families import family_of
from mrlhf.models.spec import ModelSpec

_BACKWARD = 2  # products in the backward pass for each one in the forward pass


def forward_flops(spec: ModelSpec, length: int, outputs: int) -> int:
    """Count the operations of a forward pass whose output layer sees `outputs` positions."""
    products = _choosing_products(spec, length)
    for sizes, window in zip(attention_layers(spec), spec.windows, strict=True):
        products += sizes.pair_products * visible_pairs(length, window or sizes.most_seen)
        products += sizes.token_products * length
    return _linear_flops(spec, length, outputs) + 2 * products


def _choosing_products(spec: ModelSpec, length: int) -> int:
    """Count the multiplications of what chooses the tokens that a token attends to."""
    products = 0
    for sizes in attention_layers(spec):
        if sizes.most_seen is not None and length > sizes.most_seen:
            products += sizes.choosing_products * length
            products += sizes.choosing_pair_products * visible_pairs(length, None)
    return products


def _linear_flops(spec: ModelSpec, length: int, outputs: int) -> int:
    """Count the operations of the linear layers alone."""
    attention = 0
    for sizes in attention_layers(spec):
        attention += sum(product.inputs * product.outputs for product in sizes.products)
    mlps = sum(_mlp_products(spec, layer) for layer in range(spec.num_layers))
    # A layer's input of a token: its projection, and the two products that add it.
    inputs = 3 * spec.hidden_size * spec.layer_input_size * spec.num_layers
    head = spec.hidden_size * (spec.vocab_size if spec.head == "lm" else 1)

    return 2 * ((attention + mlps + inputs) * length + head * outputs)


def _mlp_products(spec: ModelSpec, layer: int) -> int:
    """Count the multiplications for each token in the MLP of a layer."""
    experts = spec.experts
    if experts is None or not experts.layers[layer]:
        return 3 * spec.hidden_size * spec.of_layer(layer).ffn_size
    widths = experts.per_token * experts.ffn_size + experts.shared_ffn_size
    linears = experts.count + experts.shared_gate  # the router, and the gate of one row
    return spec.hidden_size * (3 * widths + linears)


def training_flops(spec: ModelSpec, sequences: Iterable[tuple[int, int]]) -> float:
    """Count the operations of one forward and backward pass.

    Frozen matrices have no gradient, and the products of adapters are not counted.

    For each sequence there are its tokens, and how many positions go through the output layer.
    """
    total = 0.0
    for length, outputs in sequences:
        total += (1 + _BACKWARD) * forward_flops(spec, length, outputs)
        total -= 2 * _BACKWARD * _choosing_products(spec, length)
        if spec.lora is not None:
            total -= _linear_flops(spec, length, outputs)
        elif spec.frozen:
            of_token, of_output = _frozen_products(spec)
            total -= 2 * (of_token * length + of_output * outputs)
    return total


@lru_cache(maxsize=4)
def _frozen_products(spec: ModelSpec) -> tuple[float, int]:
    """Count the multiplications for each token and each output with matrices that are frozen."""
    family = family_of(spec)
    shapes = family.base_shapes(spec)
    head = family.embedding if spec.output_is_embedding else family.language_head
    head = family.scalar_head if spec.head == "scalar" else head
    chosen = 1.0 if spec.experts is None else spec.experts.per_token / spec.experts.count

    of_token = 0.0
    for name in spec.frozen:
        if len(shapes[name]) == 2 and (".layers." in name or "_projection." in name):
            of_token += math.prod(shapes[name]) * (chosen if ".experts." in name else 1.0)
    return of_token, math.prod(shapes[head]) if head in spec.frozen else 0


def sequence_flops(spec: ModelSpec, lengths: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """Return `forward_flops` of each sequence."""
    layers = {length: forward_flops(spec, length, 0) for length in set(lengths)}
    head = forward_flops(spec, 0, 1)
    return [layers[length] + head * count for length, count in zip(lengths, outputs, strict=True)]


def visible_pairs(length: int, window: int | None) -> int:
    """Count the pairs (query, key): token t, from 1 on, sees min(t, window) tokens."""
    most_seen = length if window is None else min(length, window)
    return most_seen * (most_seen + 1) // 2 + (length - most_seen) * most_seen
