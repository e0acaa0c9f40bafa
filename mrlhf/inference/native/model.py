"""The decoder's forward pass for inference, over flat tokens and a paged cache.

Parameters are fused and cut as in megatron-core; the computation is that of transformers. This file
does not know sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.native.adapters import linear_of, matrix_of
from mrlhf.inference.native.attention import Attention
from mrlhf.inference.native.delta_net import DeltaLayer
from mrlhf.inference.native.experts import TorchExperts
from mrlhf.inference.native.latent_attention import LatentAttention
from mrlhf.inference.native.linear import Linear, linear_in_float32
from mrlhf.inference.native.mlp import MixtureMlp, Mlp, mlp_of_layer, norm_of
from mrlhf.inference.native.operators import Layer, StepInputs, Tables, add_norm
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.models.attention_sizes import attention_of
from mrlhf.models.rope import rope_of
from mrlhf.models.spec import ModelSpec

AnyAttention = Attention | LatentAttention | DeltaLayer

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; norms and biases are None where the model has none."""

    # A bias is added, and an output normalised, after the sum over the ranks' shares.
    attention: AnyAttention
    proj_bias: Tensor | None
    proj_norm: Tensor | None
    mlp: Mlp
    mlp_bias: Tensor | None
    mlp_output_norm: Tensor | None


class Decoder:
    """The forward pass of one version of the weights on one tensor-parallel rank.

    Weights that need no other layout on this machine share the memory of `parameters`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        parallel: TensorParallel,
        tables: Sequence[Tables],
        dtype: torch.dtype,
    ) -> None:
        self._parallel = parallel
        self._eps = spec.norm_eps
        self._embedding_multiplier = spec.embedding_scale(dtype)
        self._residual_multiplier = spec.residual_multiplier
        self._logits_divisor = spec.logits_divisor

        def tensor(name: str) -> Tensor:
            return parameters[name].to(dtype)

        norm = partial(norm_of, spec, parameters, dtype)
        layer = partial(linear_of, parameters, dtype)
        self._embedding = tensor(_EMBEDDING)
        self._layers: list[DecoderLayer] = []
        for number in range(spec.num_layers):
            attention: AnyAttention
            if spec.has_delta(number):
                attention = _delta_layer(spec, number, tensor, norm, layer)
            elif spec.latent is not None:
                attention = _latent_attention(spec, number, tables[number], parameters, norm, layer)
            else:
                attention = _attention(spec, number, tables[number], tensor, norm, layer, parallel)
            mlp = mlp_of_layer(spec, number, parameters, dtype)
            self._layers.append(_layer(spec, number, tensor, norm, attention, mlp))

        self._final_norm = norm("decoder.final_layernorm.weight")
        output = _EMBEDDING if spec.output_is_embedding else "output_layer.weight"
        self._output = parameters.made_of(
            output,
            lambda: linear_in_float32(
                self._embedding if spec.output_is_embedding else tensor(output)
            ),
        )

        # This rank's rows of the vocabulary; rows past its end are padding.
        rows = len(self._embedding)
        self.vocab_start = parallel.rank * rows
        self._vocab_rows = max(0, min(rows, spec.vocab_size - self.vocab_start))

    @property
    def stacks(self) -> list[Tensor]:
        """The experts of each mixture; a stack may be a copy made for this version."""
        mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, MixtureMlp)]
        experts = [mlp.experts.stack for mlp in mixtures if isinstance(mlp.experts, TorchExperts)]
        return [tensor for stack in experts for tensor in (stack.fc1, stack.fc2)]

    def forward(
        self, inputs: StepInputs, cache: list[Layer], record: Tensor | None = None
    ) -> Tensor:
        """Return the logits after the tokens `inputs.last`.

        Args:
            cache: keys and values of each layer, or its states; this pass adds its own.
            record: the experts of each token in the cache, [places, mixtures, per_token]; this pass
                adds its own. None: they are not recorded.

        Returns:
            float32 [rows, vocab_shard]: this rank's columns, without padding.
        """
        hidden = self._embed(inputs.tokens)
        delta: Tensor | None = None
        choices: list[Tensor] = []
        for layer, store in zip(self._layers, cache, strict=True):
            share = layer.attention(hidden, delta, inputs, store)
            delta = self._finish_block(share, layer.proj_bias, layer.proj_norm)

            share = layer.mlp(hidden, delta, choices)
            delta = self._finish_block(share, layer.mlp_bias, layer.mlp_output_norm)

        if record is not None:
            chosen = torch.stack(choices, dim=1).to(record.dtype)
            record.index_copy_(0, inputs.cache_places, chosen)
        assert delta is not None
        if len(inputs.last) < len(hidden):
            hidden = hidden[inputs.last]
            delta = delta[inputs.last]
        logits = self._output(add_norm(hidden, delta, self._final_norm, self._eps))
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        if logits.shape[1] == self._vocab_rows:
            return logits
        return logits[:, : self._vocab_rows].contiguous()

    def _finish_block(self, share: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        """Return what is added to the residual stream, from this rank's share of a product."""
        delta = self._parallel.sum(share)
        if bias is not None:
            delta = delta + bias
        if norm is not None:
            delta = add_norm(delta, None, norm, self._eps)
        if self._residual_multiplier != 1.0:
            delta = delta * self._residual_multiplier
        return delta

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [tokens, hidden]; each rank looks up its own rows."""
        if self._parallel.size == 1:
            return self._scaled(F.embedding(tokens, self._embedding))
        local = tokens - self.vocab_start
        absent = (local < 0) | (local >= len(self._embedding))
        partial = F.embedding(local.masked_fill(absent, 0), self._embedding)
        return self._scaled(self._parallel.sum(partial.masked_fill_(absent[:, None], 0)))

    def _scaled(self, embeddings: Tensor) -> Tensor:
        if self._embedding_multiplier == 1.0:
            return embeddings
        return embeddings * self._embedding_multiplier


def _attention(
    spec: ModelSpec,
    number: int,
    tables: Tables,
    tensor: Callable[[str], Tensor],
    norm: Callable[[str], Tensor],
    layer: Callable[..., Linear],
    parallel: TensorParallel,
) -> Attention:
    """Return the attention of layer `number` on this rank."""
    prefix = f"decoder.layers.{number}."
    attention = prefix + "self_attention."

    norms = None
    if spec.qk_norm != "none":
        norms = (
            norm(attention + "q_layernorm.weight"),
            norm(attention + "k_layernorm.weight"),
        )
    bias = tensor(attention + "linear_qkv.bias") if spec.qkv_bias else None
    return Attention(
        parallel=parallel,
        eps=spec.norm_eps,
        scale=spec.attention_scale,
        kv_heads=attention_of(spec).cached.on_rank(parallel.size),
        norm=norm(prefix + "input_layernorm.weight") if spec.norms_before else None,
        qkv=layer(attention + "linear_qkv.weight", bias),
        head_norms=norms if spec.qk_norm == "head" else None,
        projection_norms=norms if spec.qk_norm == "projection" else None,
        tables=tables,
        window=spec.windows[number],
        proj=layer(attention + "linear_proj.weight"),
        sinks=tensor(attention + "sinks") if spec.has_sinks else None,
        has_gate=spec.output_gate,
    )


def _delta_layer(
    spec: ModelSpec,
    number: int,
    tensor: Callable[[str], Tensor],
    norm: Callable[[str], Tensor],
    layer: Callable[..., Linear],
) -> DeltaLayer:
    """Return the delta net of layer `number` on this rank."""
    assert spec.delta is not None
    prefix = f"decoder.layers.{number}."
    own = prefix + "self_attention."
    return DeltaLayer(
        net=spec.delta,
        eps=spec.norm_eps,
        norm=norm(prefix + "input_layernorm.weight"),
        qkvz=layer(own + "linear_qkvz.weight"),
        ba=layer(own + "linear_ba.weight"),
        taps=tensor(own + "conv1d"),
        log_rate=tensor(own + "A_log"),
        bias=tensor(own + "dt_bias"),
        output_norm=tensor(own + "norm"),
        proj=layer(own + "linear_proj.weight"),
    )


def _latent_attention(
    spec: ModelSpec,
    number: int,
    tables: Tables,
    parameters: Parameters,
    norm: Callable[[str], Tensor],
    layer: Callable[..., Linear],
) -> LatentAttention:
    """Return the attention of layer `number` on this rank."""
    latent = spec.latent
    assert latent is not None
    prefix = f"decoder.layers.{number}."
    own = prefix + "self_attention."
    norm_before = norm(prefix + "input_layernorm.weight")
    down = latent.q_rank is not None

    kv_up = matrix_of(parameters, norm_before.dtype, own + "linear_kv_up_proj.weight")
    return LatentAttention(
        latent=latent,
        eps=spec.norm_eps,
        scale=spec.attention_scale,
        norm=norm_before,
        q_down=layer(own + "linear_q_down_proj.weight") if down else None,
        q_norm=norm(own + "q_layernorm.weight") if down else None,
        q_up=layer(own + ("linear_q_up_proj.weight" if down else "linear_q_proj.weight")),
        kv_down=layer(own + "linear_kv_down_proj.weight"),
        kv_norm=norm(own + "kv_layernorm.weight"),
        kv_up=kv_up.unflatten(0, (-1, latent.plain_dim + latent.value_dim)),
        tables=tables,
        proj=layer(own + "linear_proj.weight"),
    )


def _layer(
    spec: ModelSpec,
    number: int,
    tensor: Callable[[str], Tensor],
    norm: Callable[[str], Tensor],
    attention: AnyAttention,
    mlp: Mlp,
) -> DecoderLayer:
    prefix = f"decoder.layers.{number}."

    def bias(exists: bool, name: str) -> Tensor | None:
        return tensor(prefix + name) if exists else None

    def norm_after(name: str) -> Tensor | None:
        return norm(prefix + name) if spec.norms_after else None

    return DecoderLayer(
        attention=attention,
        proj_bias=bias(spec.o_bias, "self_attention.linear_proj.bias"),
        proj_norm=norm_after("self_attention.linear_proj.output_norm.weight"),
        mlp=mlp,
        mlp_bias=bias(spec.mlp_bias, "mlp.linear_fc2.bias"),
        mlp_output_norm=norm_after("mlp.linear_fc2.output_norm.weight"),
    )


def tables_of_layers(spec: ModelSpec, device: torch.device, max_length: int) -> list[Tables]:
    """Return the cosines and sines, float32, of each layer; layers that rotate alike share them."""
    # A layer that does not rotate has cosines of 1 and sines of 0, which change no number.
    by_kind: dict[str | None, Tables] = {}
    for kind in set(spec.ropes):
        frequencies = torch.zeros(spec.rotary_dim // 2)
        scale = 1.0
        if kind is not None:
            frequencies, scale = rope_of(spec, kind)
        positions = torch.arange(max_length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies.to(device=device, dtype=torch.float32))
        by_kind[kind] = (angles.cos() * scale, angles.sin() * scale)
    return [by_kind[kind] for kind in spec.ropes]
