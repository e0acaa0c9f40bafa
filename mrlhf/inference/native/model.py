"""The decoder's forward pass for inference, over flat tokens and a paged cache.

Parameters are fused and cut as in megatron-core; the computation is that of transformers. This file
does not know sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.native.attention import Attention
from mrlhf.inference.native.delta_net import DeltaLayer
from mrlhf.inference.native.experts import TorchExperts
from mrlhf.inference.native.latent_attention import LatentAttention
from mrlhf.inference.native.layer_inputs import LayerInput, layer_input, layer_inputs
from mrlhf.inference.native.layer_weights import LayerWeights, norm_of
from mrlhf.inference.native.linear import linear_in_float32
from mrlhf.inference.native.mlp import MixtureMlp, Mlp, mlp_of_layer
from mrlhf.inference.native.operators import Layer, StepInputs, Tables, add_norm
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.sparse_attention import IndexLayer
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.models.attention_sizes import attention_of
from mrlhf.models.rope import rope_of
from mrlhf.models.spec import DeltaNet, Indexer, Latent, ModelSpec
from mrlhf.parallel.vocab_sums import cap_logits

AnyAttention = Attention | LatentAttention | DeltaLayer

_EMBEDDING = "embedding.word_embeddings.weight"


class AfterSum(NamedTuple):
    """What follows the sum over the ranks' shares of an output; None where the model has none."""

    bias: Tensor | None
    norm: Tensor | None
    part_norms: tuple[Tensor, Tensor] | None = None  # of two outputs side by side, added up then


@dataclass(frozen=True)
class DecoderLayer:
    """One layer."""

    attention: AnyAttention
    after_attention: AfterSum
    mlp: Mlp
    after_mlp: AfterSum
    input: LayerInput | None
    scalar: Tensor | None  # [1], by which the layer's output is multiplied


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
        self._spec = spec
        self._parallel = parallel
        self._embedding_multiplier = spec.embedding_scale(dtype)
        self._embedding = parameters[_EMBEDDING].to(dtype)
        self._layer_inputs = None
        if spec.layer_input_size:
            self._table = parameters["layer_inputs.table.weight"].to(dtype)
            self._layer_inputs = layer_inputs(spec, parameters, dtype)
        self._layers = [
            _layer(LayerWeights(spec, parameters, dtype, number), tables[number], parallel)
            for number in range(spec.num_layers)
        ]
        self._final_norm = norm_of(spec, parameters, dtype, "decoder.final_layernorm.weight")
        output = _EMBEDDING if spec.output_is_embedding else "output_layer.weight"
        self._output = parameters.made_of(
            output,
            lambda: linear_in_float32(
                self._embedding if spec.output_is_embedding else parameters[output].to(dtype)
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
        return [tensor for stack in experts for tensor in (stack.fc1.weights, stack.fc2.weights)]

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
        hidden = self._rows(self._embedding, inputs.tokens)
        if self._embedding_multiplier != 1.0:
            hidden = hidden * self._embedding_multiplier
        own: Sequence[Tensor] = ()
        if self._layer_inputs is not None:
            own = self._layer_inputs(hidden, self._rows(self._table, inputs.tokens))
        delta: Tensor | None = None
        choices: list[Tensor] = []
        for number, (layer, store) in enumerate(zip(self._layers, cache, strict=True)):
            share = layer.attention(hidden, delta, inputs, store)
            delta = self._finish_block(share, layer.after_attention)

            share = layer.mlp(hidden, delta, choices)
            delta = self._finish_block(share, layer.after_mlp)
            if layer.input is not None:
                hidden = hidden + delta
                delta = layer.input(hidden, own[number])
            if layer.scalar is not None:
                hidden = (hidden + delta) * layer.scalar
                delta = None

        if record is not None:
            chosen = torch.stack(choices, dim=1).to(record.dtype)
            record.index_copy_(0, inputs.cache_places, chosen)
        if len(inputs.last) < len(hidden):
            hidden = hidden[inputs.last]
            delta = None if delta is None else delta[inputs.last]
        logits = self._output(add_norm(hidden, delta, self._final_norm, self._spec.norm_eps))
        if self._spec.logits_cap is not None:
            cap_logits(logits, self._spec.logits_cap)
        if self._spec.logits_divisor != 1.0:
            logits = logits / self._spec.logits_divisor
        if logits.shape[1] == self._vocab_rows:
            return logits
        return logits[:, : self._vocab_rows].contiguous()

    def _finish_block(self, share: Tensor, after: AfterSum) -> Tensor:
        """Return what is added to the residual stream, from this rank's share of a product."""
        spec = self._spec
        delta = self._parallel.sum(share)
        if after.part_norms is not None:
            pairs = zip(delta, after.part_norms, strict=True)
            first, second = (add_norm(part, None, weight, spec.norm_eps) for part, weight in pairs)
            delta = first.add_(second)
        if after.bias is not None:
            delta = delta + after.bias
        if after.norm is not None:
            delta = add_norm(delta, None, after.norm, spec.norm_eps)
        if spec.residual_multiplier != 1.0:
            delta = delta * spec.residual_multiplier
        return delta

    def _rows(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens, [tokens, columns]; each rank looks up its own."""
        if self._parallel.size == 1:
            return F.embedding(tokens, table)
        local = tokens - self.vocab_start
        absent = (local < 0) | (local >= len(table))
        partial = F.embedding(local.masked_fill(absent, 0), table)
        return self._parallel.sum(partial.masked_fill_(absent[:, None], 0))


def _layer(weights: LayerWeights, tables: Tables, parallel: TensorParallel) -> DecoderLayer:
    """Return a layer on this rank."""
    spec = weights.spec
    attention: AnyAttention
    if spec.has_delta(weights.number):
        attention = _delta_layer(weights, spec.delta)
    elif spec.latent is not None:
        attention = _latent_attention(weights, spec.latent, tables)
    else:
        attention = _attention(weights, tables, parallel)

    def after(linear: str, has_bias: bool) -> AfterSum:
        norm = weights.norm(f"{linear}.output_norm.weight") if spec.norms_after else None
        return AfterSum(weights.tensor(f"{linear}.bias") if has_bias else None, norm)

    if spec.experts is not None and spec.experts.own_norms:
        own = ("mlp.output_norm.weight", "mlp.shared.linear_fc2.output_norm.weight")
        part_norms = (weights.norm(own[0]), weights.norm(own[1]))
        after_mlp = AfterSum(None, weights.norm("mlp.sum_norm.weight"), part_norms)
    else:
        after_mlp = after("mlp.linear_fc2", spec.mlp_bias)

    return DecoderLayer(
        attention=attention,
        after_attention=after("self_attention.linear_proj", spec.o_bias),
        mlp=mlp_of_layer(weights),
        after_mlp=after_mlp,
        input=layer_input(weights) if spec.layer_input_size else None,
        scalar=weights.tensor("layer_scalar") if spec.scales_layers else None,
    )


def _attention(weights: LayerWeights, tables: Tables, parallel: TensorParallel) -> Attention:
    spec = weights.spec.of_layer(weights.number)
    own = "self_attention."
    norms = None
    if spec.qk_norm != "none":
        q_norm = weights.norm(own + "q_layernorm.weight")
        norms = (q_norm, weights.norm(own + "k_layernorm.weight") if spec.has_keys else q_norm)
    bias = weights.tensor(own + "linear_qkv.bias") if spec.qkv_bias else None
    return Attention(
        spec=spec,
        parallel=parallel,
        kv_heads=attention_of(spec).cached.on_rank(parallel.size),
        norm=weights.norm("input_layernorm.weight") if spec.norms_before else None,
        qkv=weights.linear(own + "linear_qkv.weight", bias),
        norms=norms,
        tables=tables,
        window=spec.windows[weights.number],
        proj=weights.linear(own + "linear_proj.weight"),
        sinks=weights.tensor(own + "sinks") if spec.has_sinks else None,
    )


def _delta_layer(weights: LayerWeights, net: DeltaNet | None) -> DeltaLayer:
    assert net is not None
    own = "self_attention."
    return DeltaLayer(
        net=net,
        eps=weights.spec.norm_eps,
        norm=weights.norm("input_layernorm.weight"),
        qkvz=weights.linear(own + "linear_qkvz.weight"),
        ba=weights.linear(own + "linear_ba.weight"),
        taps=weights.tensor(own + "conv1d"),
        log_rate=weights.tensor(own + "A_log"),
        bias=weights.tensor(own + "dt_bias"),
        output_norm=weights.tensor(own + "norm"),
        proj=weights.linear(own + "linear_proj.weight"),
    )


def _latent_attention(weights: LayerWeights, latent: Latent, tables: Tables) -> LatentAttention:
    own = "self_attention."
    down = latent.q_rank is not None
    kv_up = weights.matrix(own + "linear_kv_up_proj.weight")
    return LatentAttention(
        latent=latent,
        eps=weights.spec.norm_eps,
        scale=weights.spec.attention_scale,
        norm=weights.norm("input_layernorm.weight"),
        q_down=weights.linear(own + "linear_q_down_proj.weight") if down else None,
        q_norm=weights.norm(own + "q_layernorm.weight") if down else None,
        q_up=weights.linear(own + ("linear_q_up_proj.weight" if down else "linear_q_proj.weight")),
        kv_down=weights.linear(own + "linear_kv_down_proj.weight"),
        kv_norm=weights.norm(own + "kv_layernorm.weight"),
        kv_up=kv_up.unflatten(0, (-1, latent.plain_dim + latent.value_dim)),
        index=_index_layer(weights, latent.indexer),
        tables=tables,
        proj=weights.linear(own + "linear_proj.weight"),
    )


def _index_layer(weights: LayerWeights, indexer: Indexer | None) -> IndexLayer | None:
    if indexer is None or not indexer.layers[weights.number]:
        return None
    own = "self_attention.indexer."
    return IndexLayer(
        indexer=indexer,
        q=weights.linear(own + "wq_b.weight"),
        k=weights.linear(own + "wk.weight"),
        k_norm=(weights.tensor(own + "k_norm.weight"), weights.tensor(own + "k_norm.bias")),
        weights=weights.tensor(own + "weights_proj.weight"),
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
