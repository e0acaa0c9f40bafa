"""Seconds of passes through a model on one rank, from a GPU's rates and the shapes of the model.

A pass is the sum of its parts: products, attention, and what streams through memory (norms,
activations, residuals). It knows neither phases nor what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mrlhf.models.attention_sizes import attention_kinds, attention_layers, dense_widths
from mrlhf.models.flops import visible_pairs
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.planning.gpus import STATED, Gpu
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

    @property
    def operations(self) -> float:
        """Operations of all of them, a slower one counted as often as it is slower."""
        return 2 * self.tokens * self.inner * self.columns * self.times * self.slower


@dataclass(frozen=True)
class Passes:
    """The passes of one rank through a model."""

    spec: ModelSpec
    layout: ParallelLayout
    gpu: Gpu
    itemsize: int  # bytes of a weight

    def forward(self, work: Work) -> float:
        """Seconds of a micro-batch in the slowest stage, without gradients."""
        return self._layers(work) + self._head(work)

    def update(self, work: Work, recompute: bool) -> float:
        """The same with gradients; `recompute` computes the layers twice."""
        # Gradients of the input and of the weights are two products for one.
        layers = self._layers(work) * (1 + recompute) + self._layers_backward(work)
        return layers + 3 * self._head(work)

    def engine(self, work: Work) -> float:
        """Seconds of a pass of the engine; products wait for their weights from memory."""
        spec = self.spec
        layer = sum(self._engine_product(linear) for linear in self._linears(work.tokens))
        tp = self.layout.tp
        for sizes, share in attention_kinds(spec):
            seen = min(work.length, sizes.most_seen or work.length)
            numbers = sizes.cached.numbers(tp) * seen + sizes.cached.index_dim * work.length
            keys = numbers * self.itemsize * work.outputs
            states = 2 * sizes.state_bytes / tp * work.outputs
            products = sizes.engine_pair_products or sizes.pair_products
            each = products * seen + sizes.token_products
            if seen < work.length:  # every rank chooses
                each += tp * (sizes.choosing_products + sizes.choosing_pair_products * work.length)
            attention = self.gpu.computing_s(2 * each / tp * work.tokens)
            layer += share * max(attention, self.gpu.memory_s(keys + states))

        vocab = spec.vocab_size / self.layout.tp
        head = self._engine_product(_Linear(work.outputs, spec.hidden_size, vocab, 1))
        return spec.num_layers * layer + head

    def _engine_product(self, linear: _Linear) -> float:
        weights = linear.times * linear.inner * linear.columns * self.itemsize
        return max(self.gpu.computing_s(linear.operations), self.gpu.memory_s(weights))

    def _layers(self, work: Work) -> float:
        memory = _TOUCHED * self._activations(work) + self._experts(_EXPERTS_TOUCHED)
        return self._stage_layers * (self._computing(work) + memory)

    def _layers_backward(self, work: Work) -> float:
        memory = _TOUCHED_BACKWARD * self._activations(work)
        if self.spec.lora is None:
            memory += self._experts(_EXPERTS_TOUCHED_BACKWARD, _SUM_BYTES)
        return self._stage_layers * (2 * self._computing(work) + memory)

    def _computing(self, work: Work) -> float:
        """Seconds of the products and of attention in one layer, forward."""
        products = sum(linear.operations for linear in self._linears(work.tokens))
        return self.gpu.computing_s(products + self._attention(work))

    @property
    def _stage_layers(self) -> float:
        return self.spec.num_layers / self.layout.pp

    def _head(self, work: Work) -> float:
        """The output layer of a language model, forward."""
        spec = self.spec
        if spec.head != "lm":
            return 0.0
        vocab = spec.vocab_size / self.layout.tp
        return self.gpu.computing_s(2 * work.outputs * spec.hidden_size * vocab)

    def _attention(self, work: Work) -> float:
        """Operations of attention in one layer, the mean of those with and without a window."""
        spec = self.spec
        length = max(1, round(work.length))
        products = 0.0
        for sizes, window in zip(attention_layers(spec), spec.windows, strict=True):
            pairs = visible_pairs(length, window) / length
            products += sizes.pair_products * pairs + sizes.token_products
            if sizes.most_seen is not None and length > sizes.most_seen:
                products += sizes.choosing_products + sizes.choosing_pair_products * pairs
        return 2 * products / spec.num_layers / self.layout.tp * work.tokens

    def _activations(self, work: Work) -> float:
        """Seconds that it takes to read once what a layer keeps for the backward pass."""
        whole, split = layer_bytes(self.spec, "none", etp=self.layout.etp)
        return self.gpu.memory_s((whole + split / self.layout.tp) * self.itemsize / 2 * work.tokens)

    def _experts(self, touched: int, more_bytes: int = 0) -> float:
        """Seconds that it takes to read the experts' weights of a mean layer `touched` times."""
        spec = self.spec
        if spec.experts is None or self.gpu.device != "cuda":
            return 0.0
        held = spec.experts.count * spec.experts.mixtures / spec.num_layers
        held *= 3 * spec.hidden_size * spec.experts.ffn_size / (self.layout.ep * self.layout.etp)
        return self.gpu.memory_s(held * (touched * self.itemsize + more_bytes))

    def _linears(self, tokens: float) -> Iterator[_Linear]:
        """The products of a layer; where only some layers are mixtures, the mean."""
        spec = self.spec
        hidden = spec.hidden_size
        tp = self.layout.tp
        for sizes, share in attention_kinds(spec):
            for product in sizes.products:
                yield _Linear(tokens, *product.on_rank(tp), share)
        experts = spec.experts
        mixtures = 0.0 if experts is None else experts.mixtures / spec.num_layers
        for ffn_size, share in dense_widths(spec):
            yield from _mlp(tokens, hidden, ffn_size / tp, share * (1 - mixtures))
        if spec.layer_input_size:
            yield _Linear(tokens, hidden, spec.layer_input_size, 2)  # their projection, their gate
            yield _Linear(tokens, spec.layer_input_size, hidden, 1)
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
        slower = STATED.products / STATED.experts
        yield from _mlp(each, hidden, width, mixtures * chosen / ep, slower)
        if experts.shared_ffn_size:
            yield from _mlp(tokens, hidden, experts.shared_ffn_size / tp, mixtures)


def _mlp(
    tokens: float, hidden: float, ffn: float, times: float, slower: float = 1.0
) -> Iterator[_Linear]:
    if times > 0:
        yield _Linear(tokens, hidden, 2 * ffn, times, slower)
        yield _Linear(tokens, ffn, hidden, times, slower)
