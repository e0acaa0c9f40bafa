"""What a decoder-only transformer is, in numbers: the facts that a Hugging Face `config.json`
gives.

It knows neither layouts nor modules; `families` fills it in, `build` and the inference engine read
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Head = Literal["lm", "scalar"]


@dataclass(frozen=True)
class ModelSpec:
    """A dense Llama-like decoder.

    Attributes:
        family: Hugging Face `model_type`.
        head: "lm" gives logits over the vocabulary, "scalar" one number a token (value and reward
            models).
        vocab_size: rows of the embedding, unpadded.
        hidden_size: width of the residual stream.
        ffn_size: width of the gated MLP.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads (groups); divides num_heads.
        head_dim: width of one head.
        norm_eps: epsilon of every RMSNorm.
        tied_embeddings: the output layer is the embedding.
        qkv_bias: biases on q, k and v.
        qk_norm: RMSNorm on each head of q and k before rotation.
        sliding_window: tokens that a token sees, itself included; None for all.
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
    def heads_per_group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def output_is_embedding(self) -> bool:
        """Whether the output layer has no tensor of its own."""
        return self.head == "lm" and self.tied_embeddings

    def padded_vocab(self, tp: int) -> int:
        """Embedding rows over all `tp` ranks, padding included."""
        return -(-self.vocab_size // tp) * tp
