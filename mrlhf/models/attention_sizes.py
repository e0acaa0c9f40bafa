"""What the attention of a layer multiplies, keeps and caches: the one description of its sizes.

Cost (`flops`, `planning`), memory (`preflight`) and the engine's cache read it, so that a new kind
of attention states them once. Pure arithmetic on a spec; it knows no tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mrlhf.models.spec import DELTA_CHUNK, DeltaNet, Indexer, Latent, ModelSpec


class Product(NamedTuple):
    """A linear layer, or several that are one parameter."""

    inputs: int
    outputs: int
    dim: int | None  # of its matrix [outputs, inputs] that ranks split; None: each has the whole

    def on_rank(self, tp: int) -> tuple[float, float]:
        """Inputs and outputs on each of `tp` ranks."""
        inputs = self.inputs / tp if self.dim == 1 else self.inputs
        outputs = self.outputs / tp if self.dim == 0 else self.outputs
        return inputs, outputs


class CachedHeads(NamedTuple):
    """What the engine caches of a token in one layer."""

    heads: int  # KV heads, which ranks share out; if there are more ranks, several hold the same
    key_dim: int
    values_in_keys: int | None = None  # as in `CacheShape`
    index_dim: int = 0  # of the key of an indexer, which lies behind the key

    def on_rank(self, tp: int) -> int:
        """KV heads on each of `tp` ranks."""
        return max(1, self.heads // tp)

    def numbers(self, tp: int) -> int:
        """Numbers of a token on each of `tp` ranks."""
        return (2 if self.values_in_keys is None else 1) * self.on_rank(tp) * self.key_dim


@dataclass(frozen=True)
class AttentionSizes:
    """The attention of a layer over all ranks; numbers of a token count elements, not bytes."""

    products: tuple[Product, ...]
    # multiplications for a query and a key that it sees, in all heads
    pair_products: int
    keys_and_values: int  # of a token, which context parallelism exchanges
    kept: int  # of a token for the backward pass, beside the layer's input
    cached: CachedHeads  # what it reads for each token that it sees
    caches: bool = True  # whether that is its own, and not another layer's
    kept_whole: int = 0  # beside `kept`, which ranks share out: of all tokens on a rank
    # `pair_products` of the engine, which may attend in another way; None: in the same
    engine_pair_products: int | None = None
    inner_bytes: int = 0  # of a token, kept while the backward pass computes inner steps again
    token_products: int = 0  # multiplications for a token beside `products`, whatever it sees
    state_bytes: int = 0  # of a sequence in the engine, read and written for each token
    swapped: int = 0  # of a token, which context parallelism exchanges for those of other heads
    most_seen: int | None = None  # the keys that a token attends to at most; None: all
    # What chooses them, without a backward pass: multiplications for a token, and for a query and a
    # key that it sees, where some see more keys than `most_seen`.
    choosing_products: int = 0
    choosing_pair_products: int = 0


@lru_cache(maxsize=8)
def attention_layers(spec: ModelSpec) -> tuple[AttentionSizes, ...]:
    """Return the sizes of each layer's attention, or of what it has in its place."""
    layers = []
    for layer in range(spec.num_layers):
        sizes = attention_of(spec.of_layer(layer))
        indexer = spec.indexer_of(layer)
        if spec.delta is not None and spec.has_delta(layer):
            sizes = _of_delta_net(spec.hidden_size, spec.delta)
        elif spec.latent is not None and indexer is not None:
            sizes = _choosing(spec, spec.latent, indexer, sizes)
        layers.append(sizes)
    return tuple(layers)


@lru_cache(maxsize=8)
def attention_kinds(spec: ModelSpec) -> tuple[tuple[AttentionSizes, float], ...]:
    """Return the sizes of each kind of layer, and its share of the layers."""
    counts = Counter(attention_layers(spec))
    return tuple((sizes, count / spec.num_layers) for sizes, count in counts.items())


@lru_cache(maxsize=8)
def dense_widths(spec: ModelSpec) -> tuple[tuple[int, float], ...]:
    """Return each width that a dense MLP would have, and its share of the layers."""
    widths = Counter(spec.of_layer(layer).ffn_size for layer in range(spec.num_layers))
    return tuple((width, count / spec.num_layers) for width, count in widths.items())


@lru_cache(maxsize=8)
def attention_of(spec: ModelSpec) -> AttentionSizes:
    """Return the sizes of attention with the heads of `spec`; see `ModelSpec.of_layer`."""
    if spec.latent is not None:
        return _of_latents(spec, spec.latent)
    hidden = spec.hidden_size
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    projected = keys * (1 if spec.keys_are_values else 2) * spec.has_keys
    # Heads of q and of k: what the linear layer gives, they rotated, and normed if they are.
    copies = 3 if spec.qk_norm == "none" else 4
    gates = queries if spec.output_gate else 0  # they, their sigmoid, the product are kept
    of_keys = copies * keys if spec.has_keys else keys  # those of others it rotates once more
    return AttentionSizes(
        products=(
            Product(hidden, queries + gates + projected, dim=0),
            Product(queries, hidden, dim=1),
        ),
        pair_products=2 * queries,
        keys_and_values=2 * keys,
        # A norm of values gives one more copy of them; if they are the keys, they are no other.
        kept=copies * queries + of_keys + 3 * gates + max(0, projected - keys) * spec.norms_values,
        cached=CachedHeads(spec.num_kv_heads, spec.head_dim),
        caches=spec.has_keys,
    )


def _of_latents(spec: ModelSpec, latent: Latent) -> AttentionSizes:
    """The sizes of latent attention; the engine absorbs the up-projection of keys and values."""
    hidden = spec.hidden_size
    heads = spec.num_heads
    queries = heads * spec.head_dim
    values = heads * latent.value_dim
    down = latent.kv_rank + spec.rotary_dim
    products = [
        Product(hidden, down, dim=None),
        Product(latent.kv_rank, heads * latent.plain_dim + values, dim=0),
        Product(values, hidden, dim=1),
    ]
    kept_whole = down + latent.kv_rank  # what the linear layer gives, and it normed
    if latent.q_rank is None:
        products.append(Product(hidden, queries, dim=0))
    else:
        products.append(Product(hidden, latent.q_rank, dim=None))
        products.append(Product(latent.q_rank, queries, dim=0))
        kept_whole += 2 * latent.q_rank

    return AttentionSizes(
        products=tuple(products),
        pair_products=queries + values,
        keys_and_values=2 * queries,  # values are filled up to the size of keys
        kept=4 * queries + values,  # q and k rotated, v and the output filled up, the output
        cached=CachedHeads(1, down, latent.kv_rank),
        kept_whole=kept_whole,
        engine_pair_products=heads * (down + latent.kv_rank),
        most_seen=None if latent.indexer is None else latent.indexer.most,
    )


def _choosing(
    spec: ModelSpec, latent: Latent, indexer: Indexer, attention: AttentionSizes
) -> AttentionSizes:
    """The sizes of attention in a layer with an indexer, whose key is cached behind the latent."""
    assert latent.q_rank is not None, "its queries come from latents"
    rows = indexer.heads * indexer.head_dim
    return replace(
        attention,
        choosing_products=latent.q_rank * rows
        + spec.hidden_size * (indexer.head_dim + indexer.heads),
        choosing_pair_products=rows,
        cached=attention.cached._replace(index_dim=indexer.head_dim),
    )


def _of_delta_net(hidden: int, net: DeltaNet) -> AttentionSizes:
    """The sizes of a gated delta net, whose inner steps the backward pass computes again."""
    projected = net.channels + net.value_size
    # What autograd saves in a value head in bfloat16 training, in numbers of 4 bytes.
    states = net.key_dim * net.value_dim
    of_keys = (10 + 6 * net.key_heads / net.value_heads) * net.key_dim
    of_head = of_keys + 5.5 * net.value_dim + 9 * DELTA_CHUNK + 2 * states / DELTA_CHUNK
    return AttentionSizes(
        products=(
            Product(hidden, projected, dim=0),
            Product(hidden, 2 * net.value_heads, dim=0),
            Product(net.value_size, hidden, dim=1),
        ),
        pair_products=0,
        keys_and_values=0,
        kept=projected + 2 * net.value_heads + net.value_size,
        cached=CachedHeads(0, 0),
        inner_bytes=round(4 * net.value_heads * of_head),
        # The state is multiplied by a key and a query, and gets a product of a key and a value.
        token_products=3 * net.state_numbers + net.taps * net.channels,
        state_bytes=4 * net.state_numbers,
        swapped=projected + 2 * net.value_heads + net.value_size,
    )
