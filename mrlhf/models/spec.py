"""What a decoder-only transformer is, in numbers: the facts of a Hugging Face `config.json`.

A family fills it in; building a model, inference and checks before a run read it. It knows neither
layouts nor modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

WHOLE_MODEL = "whole model"
"""The name of a model's rotation where all layers that rotate do so alike."""

Head = Literal["lm", "scalar"]
QkNorm = Literal["none", "head", "projection"]
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Experts:
    """The mixtures of experts of a model: MLPs of which each token goes to a few.

    A linear layer, the router, gives a logit for each token and expert. They become scores; the
    experts with the largest scores are chosen, and their scores are the weights of their outputs.

    Attributes:
        count: experts of a mixture.
        per_token: experts that a token goes to.
        ffn_size: width of one expert.
        layers: for each layer whether its MLP is a mixture; the others have a dense MLP of the
            model's `ffn_size`.
        normalised: whether the weights of the chosen experts are divided by their sum.
        scoring: what turns the logits of a token into scores, softmax over the experts or the
            sigmoid of each.
        scale: what the weights are multiplied by then.
        groups: into how many equal groups the experts are cut, in their order.
        groups_per_token: a token chooses among the experts of so many groups only: of those whose
            two best experts have the largest sum of scores. 1 and 1: there are no groups.
        has_correction: whether a number for each expert is added to its scores for the choice, not
            for the weight.
        shared_ffn_size: width of the expert that all tokens go to; 0: there is none.
        shared_gate: whether the output of that expert is multiplied by the sigmoid of a linear
            layer of the token.
    """

    count: int
    per_token: int
    ffn_size: int
    layers: tuple[bool, ...]
    normalised: bool
    scoring: Scoring = "softmax"
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    has_correction: bool = False
    shared_ffn_size: int = 0
    shared_gate: bool = False

    @property
    def mixtures(self) -> int:
        """How many layers have a mixture."""
        return sum(self.layers)

    def number_of(self, layer: int) -> int:
        """The number of the mixture of layer `layer`; both count from 0."""
        assert self.layers[layer], f"layer {layer} has no mixture"
        return sum(self.layers[:layer])

    @property
    def record_dtype(self) -> torch.dtype:
        """The smallest type of numbers that names an expert, of those that are recorded."""
        return torch.uint8 if self.count <= 256 else torch.int16

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of the experts of one token, in all mixtures."""
        return self.mixtures * self.per_token * self.record_dtype.itemsize


@dataclass(frozen=True)
class ModelSpec:
    """A Llama-like decoder, dense or with mixtures of experts.

    Attributes:
        family: Hugging Face `model_type`; `families.family_of` gives the family.
        head: "lm" gives logits over the vocabulary, "scalar" one number for each token (value and
            reward models).
        vocab_size: rows of the embedding, unpadded.
        hidden_size: width of the residual stream.
        ffn_size: width of the gated MLP of a dense layer.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of one head.
        norm_eps: epsilon of every RMSNorm.
        tied_embeddings: whether a language model's output layer is its embedding.
        max_positions: longest sequence the rotary embedding was made for, tokens.
        rope_theta: base of the rotary frequencies.
        hf_config: the whole `config.json`, for rope scaling and for export.
        windows: for each layer how many tokens a token sees, itself included; None for all before
            it. All windows of a model are of one size.
        ropes: for each layer whose entry in `rope_parameters` rotates it: WHOLE_MODEL if the model
            has one entry for all; None for a layer that does not rotate.
        rotary_dim: how many dimensions of a head are rotated, from the first one on.
        qkv_bias: whether q, k and v have biases.
        o_bias: whether the output projection of attention has a bias.
        mlp_bias: whether the three matrices of the MLP have biases.
        qk_norm: whether RMSNorm is applied to q and k before rotation, to each head alone or to all
            heads together.
        norms_after: whether a layer normalises what attention and the MLP give, and not what they
            take.
        fused_tensors: whether a checkpoint has q, k and v in one tensor, and gate and up in one.
        embedding_multiplier: the embeddings are multiplied by it.
        residual_multiplier: what attention and the MLP give is multiplied by it.
        attention_multiplier: products of q and k are multiplied by it; None for 1 / sqrt(head_dim).
        logits_divisor: the logits are divided by it.
        experts: the mixtures of experts; None in a dense model.
    """

    family: str
    head: Head
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    rope_theta: float
    hf_config: dict[str, Any] = field(repr=False, compare=False)
    windows: tuple[int | None, ...]
    ropes: tuple[str | None, ...]
    rotary_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    norms_after: bool = False
    fused_tensors: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_divisor: float = 1.0
    experts: Experts | None = None

    @property
    def output_is_embedding(self) -> bool:
        """Whether the output layer has no tensor of its own."""
        return self.head == "lm" and self.tied_embeddings

    @property
    def attention_scale(self) -> float:
        """What products of q and k are multiplied by."""
        if self.attention_multiplier is None:
            return float(self.head_dim**-0.5)
        return self.attention_multiplier

    @property
    def sliding_window(self) -> int | None:
        """The size of the window of those layers that have one; None where no layer has."""
        sizes = {size for size in self.windows if size is not None}
        assert len(sizes) <= 1, f"windows of different sizes: {sizes}"
        return next(iter(sizes), None)

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of the layer with this number is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has a dense MLP."""
        return self.experts is None or not all(self.experts.layers)

    def padded_vocab(self, tp: int) -> int:
        """Embedding rows over all `tp` ranks, padding included."""
        return -(-self.vocab_size // tp) * tp
