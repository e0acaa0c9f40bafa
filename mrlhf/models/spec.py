"""The facts of a decoder-only transformer, from a Hugging Face `config.json`.

A family fills it in; building a model, inference and checks before a run read it. It does not know
layouts or modules.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

import torch

from mrlhf.gpu.examples import Sizes

WHOLE_MODEL = "whole model"
"""The name of a model's rotation if all layers that rotate do so alike."""

Head = Literal["lm", "scalar"]
QkNorm = Literal["none", "head", "projection"]
Norms = Literal["before", "after", "both"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class ClampedSwish:
    """The gate (up + 1) * gate * sigmoid(alpha * gate), whose inputs are clamped first.

    Gate and up alternate: gate is every other column from the first on, as in gpt-oss.
    """

    alpha: float
    limit: float  # gate is at most this; up lies between its negative and this


Activation = Literal["silu", "gelu_tanh"] | ClampedSwish


@dataclass(frozen=True)
class Experts:
    """The mixtures of experts of a model: each token goes to a few of many MLPs.

    A linear layer, the router, gives a logit for each token and expert. They become scores; the
    experts with the largest scores are chosen, and their scores are the weights of their outputs.
    """

    count: int  # experts of a mixture
    per_token: int  # experts that a token goes to
    ffn_size: int  # width of one expert
    layers: tuple[bool, ...]  # for each layer whether its MLP is a mixture, and not dense
    normalised: bool  # whether the weights of the chosen experts are divided by their sum
    scoring: Scoring = "softmax"  # from logits: softmax over the experts, or each one's sigmoid
    scale: float = 1.0  # the weights are then multiplied by it
    groups: int = 1  # number of equal groups into which the experts are cut, in their order
    # a token chooses only from this many groups: those whose two best experts have the largest sum
    # of scores; 1 of 1 means no groups
    groups_per_token: int = 1
    # adds a number for each expert to the scores for the choice, not the weights
    has_correction: bool = False
    shared_ffn_size: int = 0  # width of the expert that all tokens go to; 0: there is none
    shared_gate: bool = False  # multiply that expert's output by the sigmoid of a linear layer
    has_biases: bool = False  # whether the router and both products of an expert have biases
    activation: Activation = "silu"  # of the gate of an expert that is not shared
    # whether the shared expert and the others have each a norm of the residual stream before them
    # and one after, beside the norm of their sum, as in Gemma 4. The router then reads a norm of
    # the stream times a vector, and has a number for each expert that multiplies its weights.
    own_norms: bool = False

    @property
    def mixtures(self) -> int:
        """The number of layers that have a mixture."""
        return sum(self.layers)

    def number_of(self, layer: int) -> int:
        """Return the number of the mixture of layer `layer`; both count from 0."""
        assert self.layers[layer], f"layer {layer} has no mixture"
        return sum(self.layers[:layer])

    @property
    def record_dtype(self) -> torch.dtype:
        """The smallest dtype for the recorded numbers of experts."""
        return torch.uint8 if self.count <= 256 else torch.int16

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of the experts of one token, in all mixtures."""
        return self.mixtures * self.per_token * self.record_dtype.itemsize


@dataclass(frozen=True)
class Latent:
    """Latent attention: a token's keys and values are linear in one vector, its latent.

    A head of q and k has `plain_dim` dimensions, which come first, and `rotary_dim` of the model
    that are rotated. These are the same in the keys of all heads.
    """

    q_rank: int | None  # queries come from a latent of this size; None: from the hidden state
    kv_rank: int  # size of the latent of keys and values
    plain_dim: int
    value_dim: int  # of a head; at most that of keys
    interleaved: bool  # whether neighbours are rotated by one angle, instead of halves
    norm_eps: float = 1e-6  # of the norms of latents, whatever the model's other norms have
    indexer: Indexer | None = None  # of sparse attention


@dataclass(frozen=True)
class Indexer:
    """What chooses the tokens that each token attends to, in sparse attention; it never trains."""

    heads: int
    head_dim: int  # of which the first `rotary_dim` of the model are rotated
    interleaved: bool  # as in `Latent`
    layers: tuple[bool, ...]  # those that have one; the others take the choice of the one before
    most: int  # tokens that it chooses; among no more of them it chooses all

    def chooser_of(self, layer: int) -> int:
        """The number of the layer whose indexer chooses for the layer with this number."""
        return max(number for number in range(layer + 1) if self.layers[number])


@dataclass(frozen=True)
class GlobalHeads:
    """The heads of layers without a window, in a model where these have others than the rest."""

    kv_heads: int
    head_dim: int
    keys_are_values: bool  # see `ModelSpec`


DELTA_CHUNK = 64
"""Tokens of a delta net that are computed together in training, as in transformers."""


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets, https://arxiv.org/abs/2412.06464, in place of attention in some layers.

    A value head has a state, a matrix [key_dim, value_dim], that each token decays and corrects.
    Neighbouring value heads share a key head.
    """

    layers: tuple[bool, ...]  # for each layer whether it has a delta net, and not attention
    key_heads: int  # of q and of k
    value_heads: int  # a multiple of it
    key_dim: int  # of a head of q and k
    value_dim: int  # of a head of v
    taps: int  # tokens that the convolution of q, k and v sees, the newest included
    # whether a checkpoint's rows of q, k, v and z of a key head are together, and those of b and a
    fused_tensors: bool = True

    @property
    def key_size(self) -> int:
        """Numbers of all heads of k."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of all heads of v."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def state_numbers(self) -> int:
        """Float32 numbers of the states of a sequence in a layer."""
        return self.value_size * self.key_dim


@dataclass(frozen=True)
class Lora:
    """The low-rank adapters of a model: to W x each adds scale * B A x.

    A linear layer is known by its name in Hugging Face's model, without `.weight`. The patterns are
    peft's: a regular expression for the end of a name, and the number for the layers that match.
    """

    rank: int  # rows of A
    alpha: float  # the scale is alpha / rank, or alpha / sqrt(rank)
    # the ends of the names of the layers that have an adapter; None for all but the output layer
    # and the routers of mixtures
    targets: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()  # of these, those that have none
    rank_stabilised: bool = False  # whether the scale is alpha / sqrt(rank), as in rsLoRA
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    # whether the patterns name a matrix of all experts of a layer, without their numbers
    joins_experts: bool = False

    def adapts(self, layer: str) -> bool:
        """Whether the linear layer has an adapter."""
        if _ends_with(layer, self.excluded):
            return False
        return self.targets is None or _ends_with(layer, self.targets)

    def rank_of(self, layer: str) -> int:
        """Return the rank of the layer's adapter."""
        return _matching(self.ranks, self._pattern_name(layer), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the factor of the layer's adapter."""
        alpha = _matching(self.alphas, self._pattern_name(layer), self.alpha)
        return alpha / self.divisor(self.rank_of(layer))

    def _pattern_name(self, layer: str) -> str:
        """The name of the layer that patterns are compared with."""
        return re.sub(r"\.experts\.\d+\.", ".experts.", layer) if self.joins_experts else layer

    def divisor(self, rank: int) -> float:
        """Return what alpha is divided by in an adapter of this rank."""
        return math.sqrt(rank) if self.rank_stabilised else rank


Value = TypeVar("Value", int, float)


def _matching(patterns: tuple[tuple[str, Value], ...], layer: str, default: Value) -> Value:
    """Return the number of the first pattern that matches the layer."""
    for pattern, value in patterns:
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _ends_with(layer: str, names: frozenset[str]) -> bool:
    """Whether one of the names is that of the layer, or its end after a dot."""
    parts = layer.split(".")
    return any(".".join(parts[first:]) in names for first in range(len(parts)))


@dataclass(frozen=True)
class ModelSpec:
    """A Llama-like decoder, dense or with mixtures of experts."""

    family: str  # Hugging Face `model_type`; `families.family_of` gives the family
    head: Head  # "lm": logits over the vocabulary; "scalar": one or a few numbers for each token
    vocab_size: int  # rows of the embedding, unpadded
    hidden_size: int  # width of the residual stream
    ffn_size: int  # width of the gated MLP of a dense layer
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; divides num_heads
    head_dim: int  # width of one head of q and k, and of v if it has no other
    norm_eps: float  # of every RMSNorm
    tied_embeddings: bool  # whether a language model's output layer is its embedding
    max_positions: int  # longest sequence the rotary embedding was made for, tokens
    rope_theta: float  # base of the rotary frequencies
    # the whole `config.json`, for rope scaling and for export
    hf_config: dict[str, Any] = field(repr=False, compare=False)
    # for each layer how many tokens a token sees, itself included; None for all before it. All
    # windows of a model are of one size.
    windows: tuple[int | None, ...]
    # for each layer whose entry in `rope_parameters` rotates it: WHOLE_MODEL if the model has one
    # entry for all; None for a layer that does not rotate
    ropes: tuple[str | None, ...]
    rotary_dim: int  # how many dimensions of a head are rotated, from the first one on
    qkv_bias: bool = False  # whether q, k and v have biases
    o_bias: bool = False  # whether the output projection of attention has one
    mlp_bias: bool = False  # whether the three matrices of the MLP have biases
    # RMSNorm of q and k before rotation: of each head, or of all heads together
    qk_norm: QkNorm = "none"
    # whether softmax of attention has one more logit for each query head, a weight, without a value
    has_sinks: bool = False
    norms: Norms = "before"  # whether inputs of attention and MLP are normalised, outputs, or both
    # every norm multiplies by this + its weight, in float32; None: by its weight, after rounding
    norm_offset: float | None = None
    norms_values: bool = False  # whether each head of v has an RMSNorm too, without a weight
    keys_are_values: bool = False  # whether v is k before its norm, and there is no v_proj
    global_heads: GlobalHeads | None = None  # of layers without a window; None: as of the others
    # whether the output of each layer is multiplied by a number that is not trained
    scales_layers: bool = False
    # for each layer the one whose keys and values it attends to, itself or an earlier one of the
    # same heads; empty if each has its own
    key_layers: tuple[int, ...] = ()
    has_keys: bool = True  # in `of_layer`: whether that layer is the one it attends to
    borrower_ffn_size: int = 0  # `ffn_size` of layers that attend to others; 0: as of the rest
    layer_input_size: int = 0  # numbers that each layer adds of every token's own; 0: none
    activation: Activation = "silu"  # of the gate of every dense MLP
    fused_tensors: bool = False  # whether checkpoints have q, k, v in one tensor, and gate and up
    embedding_multiplier: float = 1.0  # the embeddings are multiplied by it
    rounds_multiplier: bool = False  # whether that number has the dtype of the embeddings
    residual_multiplier: float = 1.0  # the outputs of attention and MLP are multiplied by it
    attention_multiplier: float | None = None  # of products of q and k; None for 1 / sqrt(head_dim)
    # a scaled product x of q and k becomes cap * tanh(x / cap); None: it stays as it is
    attention_cap: float | None = None
    logits_cap: float | None = None  # of the same kind, of the products with the output layer
    logits_divisor: float = 1.0  # the logits are then divided by it
    experts: Experts | None = None  # None in a dense model
    latent: Latent | None = None  # None where keys and values come from the hidden state
    delta: DeltaNet | None = None  # None if all layers have attention
    output_gate: bool = False  # q_proj gives a gate too, by whose sigmoid attention is multiplied
    lora: Lora | None = None  # None if all weights are those of the checkpoint
    frozen: frozenset[str] = frozenset()  # tensors of the base that do not train; see `freezing`
    labels: tuple[str, ...] = ()  # names of a scalar model's numbers; empty: one without a name

    def of_layer(self, layer: int) -> ModelSpec:
        """The model with the heads and the width of the layer with this number."""
        has_others = self.global_heads is not None and self.windows[layer] is None
        kind = _with_global_heads(self) if has_others else self
        return kind if self.key_layer(layer) == layer else _borrowing(kind)

    def key_layer(self, layer: int) -> int:
        """The layer whose keys and values the layer with this number attends to."""
        return self.key_layers[layer] if self.key_layers else layer

    @property
    def links_layers(self) -> bool:
        """Whether layers take more than the hidden states of the layer before."""
        return bool(self.key_layers) or self.layer_input_size > 0

    def indexer_of(self, layer: int) -> Indexer | None:
        """The indexer of the layer with this number, if it has one."""
        indexer = None if self.latent is None else self.latent.indexer
        return indexer if indexer is not None and indexer.layers[layer] else None

    @property
    def head_kinds(self) -> tuple[ModelSpec, ...]:
        """The model with each kind of heads that a layer has."""
        own = [layer for layer in range(self.num_layers) if self.key_layer(layer) == layer]
        return tuple(dict.fromkeys(map(self.of_layer, own)))

    @property
    def output_is_embedding(self) -> bool:
        """Whether the output layer has no tensor of its own."""
        return self.head == "lm" and self.tied_embeddings

    @property
    def outputs(self) -> int:
        """How many numbers a scalar model gives for each token."""
        return len(self.labels) or 1

    @property
    def pad_id(self) -> int | None:
        """The token with which a scalar model's tokenizer must pad; None if any will do."""
        return self.hf_config.get("pad_token_id") if self.head == "scalar" else None

    @property
    def norms_before(self) -> bool:
        """Whether the inputs of attention and MLP are normalised."""
        return self.norms != "after"

    @property
    def norms_after(self) -> bool:
        """Whether the outputs of attention and MLP are normalised."""
        return self.norms != "before"

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """The factor of embeddings of this dtype."""
        if not self.rounds_multiplier:
            return self.embedding_multiplier
        return torch.tensor(self.embedding_multiplier, dtype=dtype).item()

    def layer_input_scale(self, dtype: torch.dtype) -> float:
        """The factor of the rows of this dtype that layers take as inputs."""
        return torch.tensor(math.sqrt(self.layer_input_size), dtype=dtype).item()

    @property
    def attention_scale(self) -> float:
        """The factor of products of q and k."""
        if self.attention_multiplier is None:
            return float(self.head_dim**-0.5)
        return self.attention_multiplier

    @property
    def sliding_window(self) -> int | None:
        """The size of the window of the layers that have one; None if no layer has."""
        sizes = {size for size in self.windows if size is not None}
        assert len(sizes) <= 1, f"windows of different sizes: {sizes}"
        return next(iter(sizes), None)

    def has_delta(self, layer: int) -> bool:
        """Whether the layer with this number has a delta net in place of attention."""
        return self.delta is not None and self.delta.layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of the layer with this number is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def needs_own_layers(self) -> bool:
        """Whether the model has what TransformerEngine's layers lack."""
        has_biases = self.o_bias or self.mlp_bias
        has_norms = self.norms_after or self.qk_norm == "projection" or self.norm_offset is not None
        multiplies = self.residual_multiplier != 1.0
        is_other = self.latent is not None or self.delta is not None
        has_more = self.has_sinks or self.output_gate or self.attention_cap is not None
        has_more = has_more or self.links_layers
        return has_biases or has_norms or multiplies or is_other or has_more or self.keeps_weights

    @property
    def keeps_weights(self) -> bool:
        """Whether weights of `path` stay as they are in training, and in no checkpoint of it."""
        return self.lora is not None or bool(self.frozen)

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has a dense MLP."""
        return self.experts is None or not all(self.experts.layers)

    def kernel_sizes(self, dtype: torch.dtype, page: int = 0, tp: int = 1) -> list[Sizes]:
        """The sizes at which kernels are tried for this model; `page` is that of the KV cache.

        `tp` counts the ranks that share the heads of latent attention.
        """
        delta = None
        if self.delta is not None:
            net = self.delta
            delta = (net.value_heads // net.key_heads, net.key_dim, net.value_dim, net.taps)
        latent = None
        if self.latent is not None:
            latent = (self.num_heads // tp, self.latent.kv_rank, self.rotary_dim)
        return [
            Sizes(
                kind.head_dim,
                kind.num_heads // kind.num_kv_heads,
                *(self.hidden_size, page, dtype),
                has_wide_norms=self.norm_offset is not None,
                delta=delta,
                caps=self.attention_cap is not None,
                latent=latent,
            )
            for kind in self.head_kinds
        ]

    def padded_vocab(self, tp: int) -> int:
        """Return the embedding rows over all `tp` ranks, padding included."""
        return -(-self.vocab_size // tp) * tp


@lru_cache(maxsize=8)
def _with_global_heads(spec: ModelSpec) -> ModelSpec:
    """The model with the heads of its layers without a window in all layers."""
    heads = spec.global_heads
    assert heads is not None
    return replace(
        spec,
        num_kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        rotary_dim=heads.head_dim,
        keys_are_values=heads.keys_are_values,
        global_heads=None,
    )


@lru_cache(maxsize=8)
def _borrowing(spec: ModelSpec) -> ModelSpec:
    """The model whose layers all attend to the keys and values of others."""
    width = spec.borrower_ffn_size or spec.ffn_size
    return replace(spec, has_keys=False, key_layers=(), ffn_size=width)
