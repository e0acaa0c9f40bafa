"""What a decoder-only transformer is, in numbers: the facts of a Hugging Face `config.json`.

A family fills it in; building a model, inference and checks before a run read it. It knows neither
layouts nor modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Head = Literal["lm", "scalar"]


@dataclass(frozen=True)
class ModelSpec:
    """A dense Llama-like decoder.

    Attributes:
        family: Hugging Face `model_type`; `families.family_of` gives the family.
        head: "lm" gives logits over the vocabulary, "scalar" one number for each token (value and
            reward models).
        vocab_size: rows of the embedding, unpadded.
        hidden_size: width of the residual stream.
        ffn_size: width of the gated MLP.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of one head.
        norm_eps: epsilon of every RMSNorm.
        tied_embeddings: whether a language model's output layer is its embedding.
        qkv_bias: whether q, k and v have biases.
        qk_norm: whether RMSNorm is applied to each head of q and k before rotation.
        sliding_window: how many tokens a token sees, itself included; None for all before it.
        max_positions: longest sequence the rotary embedding was made for, tokens.
        rope_theta: base of the rotary frequencies.
        hf_config: the whole `config.json`, for rope scaling and for export.
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
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None
    max_positions: int
    rope_theta: float
    hf_config: dict[str, Any] = field(repr=False, compare=False)

    @property
    def output_is_embedding(self) -> bool:
        """Whether the output layer has no tensor of its own."""
        return self.head == "lm" and self.tied_embeddings

    def padded_vocab(self, tp: int) -> int:
        """Embedding rows over all `tp` ranks, padding included."""
        return -(-self.vocab_size // tp) * tp
