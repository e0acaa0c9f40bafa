"""The most activations that a rank holds at once in an update, from shapes alone.

They are what layers keep of the micro-batches under way, and what is being computed: the loss, the
gradients of a layer or that of the embedding. `tests/device/test_activations.py` counts them. All
tokens of a full micro-batch count as those of responses. A few numbers a token and head, keys that
context parallelism gathers, inner products of adapters and experts with more tokens than others
are not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from mrlhf.models.attention_sizes import attention_layers, attention_of
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.parallel.pipeline_order import in_flight
from mrlhf.parallel.vocab import chunk_rows


def layer_bytes(
    spec: ModelSpec, recompute: str, etp: int = 1, layer: int | None = None
) -> tuple[int, int]:
    """Bytes that a layer keeps of a token in bfloat16.

    Args:
        etp: ranks that split an expert; each of them has copies of the tokens of all.
        layer: its number; None: one that has attention, and experts if the model has them.

    Returns:
        What tensor-parallel ranks each keep without sequence parallelism, and what they share out.
        Of a mixture, the copies of a token for its experts are part of the second.
    """
    inputs = 4 * spec.layer_input_size  # its own, and what it was before its norm
    if recompute == "full":
        return 2 * spec.hidden_size + inputs, 0
    attention = attention_of(spec) if layer is None else attention_layers(spec)[layer]
    of_heads = 2 * attention.kept
    norms = 4 if spec.norms == "both" else 0  # those after attention and the MLP
    of_tokens = (8 + norms) * spec.hidden_size + 2 * attention.kept_whole
    if spec.layer_input_size:
        of_tokens += inputs + 4 * spec.hidden_size + 6 * spec.layer_input_size
    of_width = 6 if spec.activation == "silu" else 8
    experts = spec.experts
    if experts is None or (layer is not None and not experts.layers[layer]):
        own = spec if layer is None else spec.of_layer(layer)
        return of_tokens, of_heads + of_width * own.ffn_size
    width = experts.per_token * experts.ffn_size + experts.shared_ffn_size
    copies = 4 * experts.per_token * spec.hidden_size * etp
    router = (12 if experts.own_norms else 2) * spec.hidden_size
    router += 5 * experts.count + 26 * experts.per_token
    return of_tokens + router, of_heads + of_width * width + copies


@lru_cache(maxsize=4096)
def most_bytes(activations: Activations) -> int:
    """The most bytes of activations at once."""
    return math.ceil(max(activations.moments()))


@dataclass(frozen=True)
class Activations:
    """The activations of a trained model on a rank of one stage, in bytes."""

    spec: ModelSpec
    layout: ParallelLayout
    stage: int  # the rank's place in the pipeline
    itemsize: int  # bytes of a weight
    micro_batch_tokens: int
    recompute: str
    sequence_parallel: bool
    device: str  # cuda or cpu

    def moments(self) -> Iterator[float]:
        """The bytes at each moment that may be the one with most."""
        stages = self.layout.stages
        numbers = stages.numbers_on(self.stage)
        layers_of = [stages.layers(number, self.spec.num_layers) for number in numbers]
        # Until its backward pass a chunk also keeps its output, and the angles of rotation.
        angles = 4 * sum(kind.head_dim for kind in self.spec.head_kinds)
        beside = self._residual + angles * self._tokens
        kept = [sum(map(self._kept, layers)) + beside for layers in layers_of]
        # From and to other stages: the input of the next pass, the gradient that was sent last.
        exchanged = self._residual * (2 if self.layout.vpp > 1 else min(self.stage, 1))

        for chunk, counts in in_flight(self.stage, self.layout.pp, self.layout.vpp):
            held = exchanged + sum(map(mul, counts, kept))
            if numbers[chunk] == stages.count - 1 and self.spec.head == "lm":
                yield held + self._loss
                # That of an output layer which is the embedding waits for the embedding's.
                held += self._table * (self.spec.output_is_embedding and stages.count == 1)
            yield held + self._backward(layers_of[chunk])
            if numbers[chunk] == 0:
                inputs = self.spec.num_layers * self.spec.layer_input_size  # columns of their table
                table = self._table * max(1, inputs / self.spec.hidden_size)
                yield held - kept[chunk] + self._residual + table

    @property
    def _tokens(self) -> float:
        return self.micro_batch_tokens / self.layout.cp

    @property
    def _splits(self) -> bool:
        """Whether the ranks of `tp` share out the tokens between layers."""
        return self.sequence_parallel and self.layout.tp > 1

    @property
    def _states(self) -> float:
        """Hidden states of a micro-batch."""
        return self.itemsize * self._tokens * self.spec.hidden_size

    @property
    def _residual(self) -> float:
        """Those of them that a rank has between layers."""
        return self._states / (self.layout.tp if self._splits else 1)

    @property
    def _weight(self) -> float:
        """Elements of a rank's gradient of a row of weights; 0 where adapters alone have one."""
        return self.itemsize / self.layout.tp * (self.spec.lora is None)

    @property
    def _table(self) -> float:
        """The gradient of the embedding, or of the output layer, before it is added up."""
        return self._weight * self.spec.vocab_size * self.spec.hidden_size

    def _kept(self, layer: int, recompute: str | None = None) -> float:
        recompute = recompute or self.recompute
        whole, split = layer_bytes(self.spec, recompute, self.layout.etp, layer)
        each = whole / (self.layout.tp if self._splits else 1) + split / self.layout.tp
        return self._tokens * (each * self.itemsize / 2 + self._chosen(layer, recompute))

    def _chosen(self, layer: int, recompute: str) -> int:
        """Bytes of the places of the keys that a layer's indexer chooses for a token."""
        every = attention_layers(self.spec)
        most = every[layer].most_seen
        if most is None or not every[layer].choosing_products or self.micro_batch_tokens <= most:
            return 0
        # Layers after it may need them still when it computes them again.
        is_shared = layer + 1 < len(every) and not every[layer + 1].choosing_products
        return 4 * most if is_shared or recompute != "full" else 0

    @property
    def _loss(self) -> float:
        """Logits in float32, and their gradient; three times hidden states; a gradient's sum."""
        row = self.itemsize * self.spec.vocab_size / self.layout.tp
        rows = min(self._tokens, chunk_rows(int(row), self.device))
        times = 4 / self.itemsize
        # In float32 the gradient of the logits is written over them. A cap has slopes.
        capped = times * (self.spec.logits_cap is not None)
        logits = rows * row * (times + (self.itemsize < 4) + capped)
        # Hidden states, those selected, and their gradient.
        return logits + 3 * self._states + self._table * times

    def _backward(self, layers: Sequence[int]) -> float:
        """Bytes that the backward pass takes in the top layer, beside what layers keep."""
        taken = self._residual  # the gradient of its output
        if not layers:
            return taken
        top = layers[-1]
        if self.recompute == "full":  # it is there whole, with its output
            taken += self._kept(top, "none") - self._kept(top) + self._residual
        if self._splits:
            taken += self._states  # inputs are gathered in one buffer for all layers
        every = attention_layers(self.spec)
        inner = self._tokens / self.layout.tp * max(every[layer].inner_bytes for layer in layers)
        return taken + max(inner, self._mixture if self.spec.has_experts(top) else self._mlp(top))

    def _mlp(self, layer: int) -> float:
        """The most that gradients in an MLP take, less what it has ceased to keep by then."""
        width = self.spec.of_layer(layer).ffn_size
        inner = self.itemsize * self._tokens * width / self.layout.tp
        weight = self._weight * self.spec.hidden_size * width
        gathered = self._states * self._splits
        # After the second product, the activation and the first product. Gradients of weights
        # have been added up, but megatron-core makes tensors of their size.
        return max(inner + gathered + weight, 2 * inner, self._states + 2 * weight - inner)

    @property
    def _mixture(self) -> float:
        """The same of a mixture, where each token is copied for its experts."""
        layout, experts = self.layout, self.spec.experts
        assert experts is not None
        tokens = self.itemsize * self._tokens / layout.tp
        copies = tokens * layout.etp * experts.per_token * self.spec.hidden_size
        inner = tokens * experts.per_token * experts.ffn_size
        split = layout.ep * layout.etp / layout.tp
        weight = self._weight * self.spec.hidden_size * experts.ffn_size * experts.count / split
        shared = tokens * experts.shared_ffn_size
        # Gradients of weights are there twice, since those of experts without tokens become zero.
        return max(copies, inner + 2 * weight, 2 * inner - copies, 4 * weight - inner, 2 * shared)
