"""The decoder's forward pass for inference, over flat tokens and a paged cache.

Parameters are fused and cut as in megatron-core; what is computed is what transformers computes.
One pass takes `StepInputs` and returns logits. This file knows neither sampling nor scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.cache_size import kv_heads_on_rank
from mrlhf.inference.native import kernels
from mrlhf.inference.native.linear import Linear, linear
from mrlhf.inference.native.operators import (
    HostOperators,
    Layer,
    Operators,
    StepInputs,
    TorchOperators,
)
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.models.rope import inverse_frequencies
from mrlhf.models.spec import ModelSpec


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: norms as tensors, products as functions; `qk_norms` where the model has them."""

    input_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    proj: Linear
    mlp_norm: Tensor
    fc1: Linear
    fc2: Linear


class Decoder:
    """The forward pass of one version of the weights on one tensor-parallel rank."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        parallel: TensorParallel,
        operators: Operators,
        dtype: torch.dtype,
    ) -> None:
        """Lay the weights out for this machine.

        Weights that stay as they are share the memory of `parameters`.

        Args:
            spec: a language model.
            parameters: this rank's weights.
            parallel: the ranks of the replica.
            operators: the steps of a layer besides its matrix products.
            dtype: in which to compute.
        """
        self._parallel = parallel
        self._operators = operators
        self._head_dim = spec.head_dim
        self._kv_heads = kv_heads_on_rank(spec, parallel.size)
        self._heads_per_kv_head = spec.num_heads // parallel.size // self._kv_heads

        def tensor(name: str) -> Tensor:
            return parameters[name].to(dtype)

        self._embedding = tensor("embedding.word_embeddings.weight")
        self._layers = [_layer(spec, number, tensor) for number in range(spec.num_layers)]
        self._final_norm = tensor("decoder.final_layernorm.weight")
        self._output = linear(
            self._embedding if spec.output_is_embedding else tensor("output_layer.weight")
        )

        # This rank's rows of the vocabulary; those past its end are padding.
        rows = len(self._embedding)
        self.vocab_start = parallel.rank * rows
        self._vocab_rows = max(0, min(rows, spec.vocab_size - self.vocab_start))

    def forward(self, inputs: StepInputs, cache: list[Layer]) -> Tensor:
        """The logits after the tokens `inputs.last`.

        Args:
            inputs: the tokens of the pass.
            cache: keys and values of each layer; those of the pass are written.

        Returns:
            [rows, vocab_shard]: this rank's columns, without those of padding.
        """
        operators = self._operators
        parallel = self._parallel
        shape = (len(inputs.tokens), self._kv_heads, self._heads_per_kv_head + 2, self._head_dim)

        hidden = self._embed(inputs.tokens)
        delta: Tensor | None = None
        for layer, store in zip(self._layers, cache, strict=True):
            qkv = layer.qkv(operators.add_norm(hidden, delta, layer.input_norm)).view(shape)
            q = operators.rotate_store(qkv, layer.qk_norms, inputs, store)
            context = operators.attend(q, store, inputs)
            delta = parallel.sum(layer.proj(context.flatten(1)))
            gate_up = layer.fc1(operators.add_norm(hidden, delta, layer.mlp_norm))
            delta = parallel.sum(layer.fc2(operators.gated(gate_up)))

        assert delta is not None
        if len(inputs.last) < len(hidden):
            hidden = hidden[inputs.last]
            delta = delta[inputs.last]
        logits = self._output(operators.add_norm(hidden, delta, self._final_norm))
        if logits.shape[1] == self._vocab_rows:
            return logits
        return logits[:, : self._vocab_rows].contiguous()

    def _embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of `tokens` [tokens], [tokens, hidden]; each rank looks up its rows."""
        if self._parallel.size == 1:
            return F.embedding(tokens, self._embedding)
        local = tokens - self.vocab_start
        absent = (local < 0) | (local >= len(self._embedding))
        partial = F.embedding(local.masked_fill(absent, 0), self._embedding)
        return self._parallel.sum(partial.masked_fill_(absent[:, None], 0))


def _layer(spec: ModelSpec, number: int, tensor: Callable[[str], Tensor]) -> DecoderLayer:
    prefix = f"decoder.layers.{number}."
    attention = prefix + "self_attention."
    norms = None
    if spec.qk_norm:
        q_norm = tensor(attention + "q_layernorm.weight")
        k_norm = tensor(attention + "k_layernorm.weight")
        norms = (q_norm, k_norm)
    bias = tensor(attention + "linear_qkv.bias") if spec.qkv_bias else None

    return DecoderLayer(
        input_norm=tensor(prefix + "input_layernorm.weight"),
        qkv=linear(tensor(attention + "linear_qkv.weight"), bias),
        qk_norms=norms,
        proj=linear(tensor(attention + "linear_proj.weight")),
        mlp_norm=tensor(prefix + "pre_mlp_layernorm.weight"),
        fc1=linear(tensor(prefix + "mlp.linear_fc1.weight")),
        fc2=linear(tensor(prefix + "mlp.linear_fc2.weight")),
    )


def make_operators(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_length: int
) -> Operators:
    """The fastest operators that this machine has for a model in `dtype`.

    The cosines and sines of positions are rounded to `dtype`, as in transformers.
    """
    frequencies = inverse_frequencies(spec).to(device=device, dtype=torch.float32)
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32, device=device), frequencies)
    cosines = angles.cos().to(dtype).float()
    sines = angles.sin().to(dtype).float()

    compiled = kernels.load(dtype) if device.type == "cpu" else None
    if compiled is None:
        return TorchOperators(cosines, sines, spec.norm_eps, spec.sliding_window)
    return HostOperators(compiled, cosines, sines, spec.norm_eps, spec.sliding_window)
