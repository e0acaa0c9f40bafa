"""The decoder's forward pass for inference, as functions of weights and a KV cache: prefill and decode.

Parameters are fused and cut as megatron-core's; what is computed is what transformers computes. It knows neither
sampling nor scheduling, and sees sequences only as slots of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.native.kv_cache import KVCache
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.models.rope import inverse_frequencies
from mrlhf.models.spec import ModelSpec

# (layer, q [tokens, groups, heads_per_group, head_dim], k and v [tokens, groups, head_dim]) -> context, shaped as q
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's parameters; `qk_norm` [heads_per_group + 1, head_dim] is the q norm for each head, and the k norm."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    proj: Tensor
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor


@dataclass(frozen=True)
class Weights:
    """All parameters in the order of use, for one call of generate: made anew after each commit."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Tensor

    @classmethod
    def of(cls, parameters: Parameters, spec: ModelSpec) -> Weights:
        """The weights as `parameters` has them now."""
        embedding = parameters["embedding.word_embeddings.weight"]
        return cls(
            embedding=embedding,
            layers=tuple(_layer_weights(parameters, spec, layer) for layer in range(spec.num_layers)),
            final_norm=parameters["decoder.final_layernorm.weight"],
            output=embedding if spec.output_is_embedding else parameters["output_layer.weight"],
        )


def _layer_weights(parameters: Parameters, spec: ModelSpec, layer: int) -> LayerWeights:
    prefix = f"decoder.layers.{layer}."
    attention = prefix + "self_attention."
    qk_norm = None
    if spec.qk_norm:
        q_norm, k_norm = (parameters[f"{attention}{kind}_layernorm.weight"] for kind in "qk")
        qk_norm = torch.stack([*[q_norm] * spec.heads_per_group, k_norm])
    return LayerWeights(
        input_norm=parameters[prefix + "input_layernorm.weight"],
        qkv=parameters[attention + "linear_qkv.weight"],
        qkv_bias=parameters[attention + "linear_qkv.bias"] if spec.qkv_bias else None,
        qk_norm=qk_norm,
        proj=parameters[attention + "linear_proj.weight"],
        mlp_norm=parameters[prefix + "pre_mlp_layernorm.weight"],
        fc1=parameters[prefix + "mlp.linear_fc1.weight"],
        fc2=parameters[prefix + "mlp.linear_fc2.weight"],
    )


class Decoder:
    """The forward pass of one model on one tensor-parallel rank; holds no weights."""

    def __init__(
        self, spec: ModelSpec, parallel: TensorParallel, device: torch.device, dtype: torch.dtype, max_length: int
    ) -> None:
        self._spec, self._parallel, self._device = spec, parallel, device
        frequencies = inverse_frequencies(spec).to(device=device, dtype=torch.float32)
        angles = torch.outer(torch.arange(max_length, dtype=torch.float32, device=device), frequencies)
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(dtype)
        # Signed so that x * cos + (x rolled by half a head) * sin is the rotation.
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype)

    def prefill(
        self, weights: Weights, tokens: Tensor, lengths: Tensor, cache: KVCache, rows: Tensor, slots: Tensor
    ) -> Tensor | None:
        """Compute whole prompts and put their keys and values into the cache.

        Args:
            weights: the model.
            tokens: int64 [prompts, seq_len], padded on the right with any valid token.
            lengths: int64 [prompts].
            cache: row `rows[i]` of the prompts is written to slot `slots[i]`.
            rows: int64 [samples].
            slots: int64 [samples].

        Returns:
            Logits [prompts, vocab] after each prompt's last token, on tensor-parallel rank 0; None on the others.
        """
        prompts, seq_len = tokens.shape
        window = None if self._spec.sliding_window is None else self._prefill_mask(seq_len)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = q.flatten(1, 2).unflatten(0, (prompts, seq_len)).transpose(1, 2)
            keys, values = (x.unflatten(0, (prompts, seq_len)).transpose(1, 2) for x in (k, v))
            cache.fill(layer, keys, values, rows, slots)
            context = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=window, is_causal=window is None, enable_gqa=True
            )
            return context.transpose(1, 2).reshape(q.shape)

        positions = torch.arange(seq_len, device=self._device).repeat(prompts)
        hidden = self._forward(weights, tokens.flatten(), positions, attend)
        last = torch.arange(prompts, device=self._device) * seq_len + lengths - 1
        return self._logits(weights, hidden[last])

    def decode(self, weights: Weights, tokens: Tensor, positions: Tensor, length: int, cache: KVCache) -> Tensor | None:
        """Compute one token a sequence, of slots 0 .. batch - 1.

        Args:
            weights: the model.
            tokens: int64 [batch].
            positions: int64 [batch], number of tokens before each.
            length: at least the largest position + 1.
            cache: keys and values of the tokens before; those of `tokens` are added.

        Returns:
            Logits [batch, vocab] on tensor-parallel rank 0; None on the others.
        """
        mask = self._visible(positions[:, None], torch.arange(length, device=self._device))[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append(layer, k, v, positions)
            keys, values = cache.view(layer, len(tokens), length)
            # The heads of a group see the same keys: they are the rows of one small attention.
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

        return self._logits(weights, self._forward(weights, tokens, positions, attend))

    def _visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query position sees each key position; the two broadcast."""
        visible = keys <= queries
        if self._spec.sliding_window is not None:
            visible &= keys > queries - self._spec.sliding_window
        return visible

    def _prefill_mask(self, seq_len: int) -> Tensor:
        positions = torch.arange(seq_len, device=self._device)
        return self._visible(positions[:, None], positions)

    def _forward(self, weights: Weights, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [tokens, hidden] of flat `tokens`, before the final norm."""
        cos, sin = self._cos[positions][:, None, None], self._sin[positions][:, None, None]
        hidden = self._embed(weights.embedding, tokens)
        for number, layer in enumerate(weights.layers):
            q, k, v = self._qkv(layer, self._norm(hidden, layer.input_norm), cos, sin)
            context = attend(number, q, k, v).flatten(1)
            hidden = hidden + self._parallel.sum(F.linear(context, layer.proj))
            gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.fc1).chunk(2, dim=-1)
            hidden = hidden + self._parallel.sum(F.linear(F.silu(gate) * up, layer.fc2))
        return hidden

    def _embed(self, embedding: Tensor, tokens: Tensor) -> Tensor:
        if self._parallel.size == 1:
            return F.embedding(tokens, embedding)
        local = tokens - self._parallel.rank * embedding.shape[0]
        absent = (local < 0) | (local >= embedding.shape[0])
        return self._parallel.sum(F.embedding(local.masked_fill(absent, 0), embedding).masked_fill(absent[:, None], 0))

    def _qkv(self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [tokens, groups, heads_per_group, head_dim], and k and v [tokens, groups, head_dim]."""
        per_group = self._spec.heads_per_group
        fused = F.linear(hidden, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, per_group + 2, self._spec.head_dim))
        qk, v = fused[:, :, : per_group + 1], fused[:, :, per_group + 1]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        rotated = torch.addcmul(qk * cos, qk.roll(self._spec.head_dim // 2, dims=-1), sin)
        return rotated[:, :, :per_group], rotated[:, :, per_group], v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm as transformers has it: the normalised value is rounded to its dtype, then scaled."""
        return F.rms_norm(x, x.shape[-1:], eps=self._spec.norm_eps) * weight

    def _logits(self, weights: Weights, hidden: Tensor) -> Tensor | None:
        """Logits [batch, vocab] of hidden states [batch, hidden], padding columns cut."""
        shard = F.linear(self._norm(hidden, weights.final_norm), weights.output)
        logits = self._parallel.gather_columns(shard)
        return None if logits is None else logits[:, : self._spec.vocab_size]
