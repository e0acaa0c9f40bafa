"""Seconds of passes through a model on one rank, from its kernels and the shapes of the model.

A pass is the sum of its parts: products by shape, attention, what streams through memory (norms,
activations, residuals), logits, and fixed costs. It knows neither phases nor what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mrlhf.models.flops import visible_pairs
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.planning.gpus import Gpu
from mrlhf.preflight.activations import layer_bytes

# How often what a layer keeps for the backward pass goes through memory: it is written and read,
# then read again, while its gradient is written and read.
_TOUCHED = 2
_TOUCHED_BACKWARD = 3
# The same of the weights of all experts, whether they get tokens or not, beside their products: on
# a GPU they are copied into one tensor for each pass, and a gradient is filled with zeros where an
# expert had no token, and added to a float32 sum (`mrlhf/models/grouped_products.py`).
_EXPERTS_TOUCHED = 2
_EXPERTS_TOUCHED_BACKWARD = 5
_SUM_BYTES = 8  # of a weight, read and written


@dataclass(frozen=True)
class Work:
    """A micro-batch, or the rows of a pass of the engine, as a rank sees it."""

    tokens: float
    length: float  # of each sequence, tokens; in generation, the mean that a token sees
    outputs: float  # tokens whose logits are computed; in generation, one of each sequence


class _Linear(NamedTuple):
    """Products of one shape: how many tokens go through one, and how many a layer has."""

    tokens: float
    inner: float
    columns: float
    times: float
    slower: float = 1.0  # one takes so many times as long as the speed of products says


@dataclass(frozen=True)
class Passes:
    """The passes of one rank through a model."""

    spec: ModelSpec
    layout: ParallelLayout
    gpu: Gpu
    itemsize: int  # bytes of a weight

    def forward(self, work: Work) -> float:
        """Seconds of a micro-batch in the slowest stage, without gradients."""
        return self._layers(work) + self._head(work) + self.gpu.kernels.pack_s

    def update(self, work: Work, recompute: bool) -> float:
        """The same with gradients; `recompute` computes the layers twice."""
        kernels = self.gpu.kernels
        seconds = self._layers(work) * (1 + recompute) + self._layers_backward(work)
        return seconds + self._head(work, backward=True) + kernels.pack_s + kernels.pack_backward_s

    def engine(self, work: Work) -> float:
        """Seconds of a pass of the engine; products wait for their weights from memory."""
        kernels = self.gpu.kernels
        spec = self.spec
        vocab = spec.vocab_size / self.layout.tp
        layer = sum(self._engine_product(linear) for linear in self._linears(work.tokens))
        kv_heads = max(1, spec.num_kv_heads // self.layout.tp)
        keys = 2 * kv_heads * spec.head_dim * self.itemsize * work.outputs * work.length
        heads = spec.num_heads * spec.head_dim / self.layout.tp
        attention = self._attention_s(4 * heads * work.tokens * work.length)
        reading = keys / (1e9 * self.gpu.reached.memory * kernels.engine_keys_gb_s)
        layer += max(attention, reading) + kernels.engine_layer_s

        head = self._engine_product(_Linear(work.outputs, spec.hidden_size, vocab, 1))
        logits = work.outputs * vocab / (1e9 * kernels.logits_g_s)
        fixed = kernels.engine_pass_s + work.outputs * kernels.engine_row_s
        return spec.num_layers * layer + head + logits + fixed

    def _engine_product(self, linear: _Linear) -> float:
        tokens, inner, columns, times, slower = linear
        seconds = slower * self.gpu.kernels.engine_products.seconds(tokens, inner, columns)
        reached = self.gpu.reached.products
        return times * max(seconds / reached, self._read(inner * columns * self.itemsize))

    def _read(self, nbytes: float) -> float:
        """Seconds in which so many bytes come from memory."""
        return nbytes / (1e9 * self.gpu.reached.memory * self.gpu.memory_gb_s)

    def _layers(self, work: Work) -> float:
        table = self.gpu.kernels.products
        products = 0.0
        for tokens, inner, columns, times, slower in self._linears(work.tokens):
            products += times * slower * table.seconds(tokens, inner, columns)
        seconds = products / self.gpu.reached.products
        seconds += self._attention_s(self._attention(work))
        seconds += _TOUCHED * self._activations(work) + self._experts(_EXPERTS_TOUCHED)
        return self._stage_layers * (seconds + self.gpu.kernels.layer_s)

    def _layers_backward(self, work: Work) -> float:
        table = self.gpu.kernels.products
        products = 0.0
        for tokens, inner, columns, times, slower in self._linears(work.tokens):
            of_input = table.seconds(tokens, columns, inner)
            of_weight = table.seconds(columns, tokens, inner)
            products += times * slower * (of_input + of_weight)
        seconds = products / self.gpu.reached.products
        seconds += self._attention_s(2 * self._attention(work), backward=True)
        seconds += _TOUCHED_BACKWARD * self._activations(work)
        if self.spec.lora is None:
            seconds += self._experts(_EXPERTS_TOUCHED_BACKWARD, _SUM_BYTES)
        return self._stage_layers * (seconds + self.gpu.kernels.layer_backward_s)

    @property
    def _stage_layers(self) -> float:
        """Layers of a stage."""
        return self.spec.num_layers / self.layout.pp

    def _head(self, work: Work, backward: bool = False) -> float:
        """The output layer of a language model, and log-probabilities."""
        spec = self.spec
        if spec.head != "lm":
            return 0.0
        vocab = spec.vocab_size / self.layout.tp
        table = self.gpu.kernels.products
        products = table.seconds(work.outputs, spec.hidden_size, vocab)
        speed = self.gpu.kernels.logits_g_s
        if backward:
            products += table.seconds(work.outputs, vocab, spec.hidden_size)
            products += table.seconds(vocab, work.outputs, spec.hidden_size)
            speed = self.gpu.kernels.logits_backward_g_s
        return products / self.gpu.reached.products + work.outputs * vocab / (1e9 * speed)

    def _attention(self, work: Work) -> float:
        """Operations of attention in one layer, the mean of those with and without a window."""
        spec = self.spec
        length = max(1, round(work.length))
        pairs = sum(visible_pairs(length, window) for window in spec.windows) / spec.num_layers
        heads = spec.num_heads * spec.head_dim / self.layout.tp
        return 4 * heads * pairs * work.tokens / length

    def _attention_s(self, operations: float, backward: bool = False) -> float:
        kernels = self.gpu.kernels
        speed = kernels.attention_backward_tflops if backward else kernels.attention_tflops
        return operations / (1e12 * speed * self.gpu.reached.products)

    def _activations(self, work: Work) -> float:
        """Seconds in which what a layer keeps passes through memory once."""
        whole, split = layer_bytes(self.spec, "none", etp=self.layout.etp)
        nbytes = (whole + split / self.layout.tp) * self.itemsize / 2 * work.tokens
        return nbytes / (1e9 * self.gpu.reached.memory * self.gpu.kernels.streamed_gb_s)

    def _experts(self, touched: int, more_bytes: int = 0) -> float:
        """Seconds in which the experts' weights of a mean layer pass through memory so often."""
        spec = self.spec
        if spec.experts is None or self.gpu.device != "cuda":
            return 0.0
        held = spec.experts.count * spec.experts.mixtures / spec.num_layers
        held *= 3 * spec.hidden_size * spec.experts.ffn_size / (self.layout.ep * self.layout.etp)
        return self._read(held * (touched * self.itemsize + more_bytes))

    def _linears(self, tokens: float) -> Iterator[_Linear]:
        """The products of a layer; where only some layers are mixtures, the mean."""
        spec = self.spec
        hidden = spec.hidden_size
        tp = self.layout.tp
        queries = spec.num_heads * spec.head_dim / tp
        kv = spec.num_kv_heads * spec.head_dim / tp
        yield _Linear(tokens, hidden, queries + 2 * kv, 1)
        yield _Linear(tokens, queries, hidden, 1)
        experts = spec.experts
        mixtures = 0.0 if experts is None else experts.mixtures / spec.num_layers
        yield from _mlp(tokens, hidden, spec.ffn_size / tp, 1 - mixtures)
        if experts is None:
            return

        yield _Linear(tokens, hidden, experts.count, mixtures)
        # Those that get a token, if each token chooses at random.
        chosen = experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)
        each = tokens * experts.per_token / chosen
        # Tokens of all ranks of `ep` meet in the experts that one of them holds; ranks of `tp` have
        # parts of them, except those that split an expert.
        ep = self.layout.ep
        each *= ep * self.layout.etp / tp
        width = experts.ffn_size / self.layout.etp
        slower = self.gpu.reached.products / self.gpu.reached.experts
        yield from _mlp(each, hidden, width, mixtures * chosen / ep, slower)
        if experts.shared_ffn_size:
            yield from _mlp(tokens, hidden, experts.shared_ffn_size / tp, mixtures)


def _mlp(
    tokens: float, hidden: float, ffn: float, times: float, slower: float = 1.0
) -> Iterator[_Linear]:
    if times > 0:
        yield _Linear(tokens, hidden, 2 * ffn, times, slower)
        yield _Linear(tokens, ffn, hidden, times, slower)
