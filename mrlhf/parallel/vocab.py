"""The output layer of a language model, and losses of the distributions that it gives.

Hidden states are projected onto the vocabulary, which is split over tensor-parallel ranks, a chunk
of tokens at a time. A few numbers for each token remain of a chunk's logits, so no tensor of
[tokens, vocab] is ever made.

For training, the caller walks through `LossParts` and adds the loss of each part, whose gradient is
taken while the logits are there. A chunk holds whole sequences wherever they are short enough, so
that a loss over whole sequences needs the logits once. Where several ranks hold parts of each
sequence, all of them cut between the same sequences. This file knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.host.products import add_mm, mm
from mrlhf.parallel.vocab_subset import Subset
from mrlhf.parallel.vocab_sums import (
    Columns,
    LocalSums,
    Normalisers,
    NumbersToCompute,
    TokenNumbers,
    add_mixture,
    cap_logits,
    cap_slopes,
    write_gradient,
)
from mrlhf.records import SamplingMasks

# Size of the logits of a chunk. The matrix products want many rows, memory wants few.
_CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}
_LEAST_CHUNK_TOKENS = 128
# The logit of a token that has no probability; finite, so that 0 times it is 0.
_EXCLUDED = -1e20


def chunk_rows(row_bytes: int, device: str) -> int:
    """The most tokens of a chunk on this type of device, `row_bytes` the logits of one."""
    return max(_LEAST_CHUNK_TOKENS, _CHUNK_BYTES[device] // row_bytes)


@dataclass(frozen=True)
class OutputLayer:
    """This rank's shard of the projection onto the vocabulary."""

    # [vocab_shard, hidden]. Rank r of the group holds the rows from r * vocab_shard on. Rows from
    # `vocab_size` on are padding: they have probability and gradient 0.
    weight: Tensor
    group: dist.ProcessGroup | None  # that holds the shards; None if this rank holds all rows
    vocab_size: int  # number of rows over all ranks, without padding
    scale: float  # multiplies the products
    cap: float | None = None  # before, each becomes cap * tanh(product / cap)

    @property
    def columns(self) -> Columns:
        """The columns of the logits on this rank."""
        shard = len(self.weight)
        first = 0 if self.group is None else self.group.rank() * shard
        return Columns(first, max(0, min(shard, self.vocab_size - first)), self.scale)


@dataclass(frozen=True)
class ReferenceTokens:
    """Consecutive tokens of one reference, for the KL to it."""

    layer: OutputLayer  # its output layer
    hidden: Tensor  # [tokens, hidden], its hidden states


@dataclass(frozen=True)
class Tokens:
    """Some tokens, and the hidden states that their distributions are computed from."""

    hidden: Tensor  # [tokens, hidden], equal on all ranks of the output layer's group
    targets: Tensor  # int64 [tokens], each in [0, vocab_size)
    lengths: Sequence[int]  # tokens of each sequence here, one sequence after the other
    # All tokens again, those of one reference after those of another; None: no KL is wanted.
    references: Sequence[ReferenceTokens] | None = None
    # The most tokens that each has on any of the ranks that hold parts of it; None if this rank
    # holds them whole.
    most_lengths: Sequence[int] | None = None
    # The distributions are over the tokens that these, a row a token, let through; None: over all.
    masks: SamplingMasks | None = None
    heads: Tensor | None = None  # int64 [tokens, head], tokens whose log-probabilities are wanted


@torch.no_grad()
def token_numbers(layer: OutputLayer, tokens: Tokens, wanted: NumbersToCompute) -> TokenNumbers:
    """Each token's numbers, on all ranks of the layer's group; bit for bit those of `LossParts`."""
    projection = _Projection(layer, tokens, wanted)
    return projection.measure(projection.chunks)[0]


@dataclass(frozen=True)
class LossPart:
    """Consecutive tokens whose loss is evaluated at once."""

    rows: slice  # the range of the sequences that they belong to
    chunks: list[slice]  # their ranges among this rank's tokens, chunk by chunk
    numbers: TokenNumbers  # those that are wanted, of these tokens; they have gradients
    normalisers: Normalisers  # for the gradients

    @property
    def tokens(self) -> slice:
        """Their range among this rank's tokens."""
        return slice(self.chunks[0].start, self.chunks[-1].stop)


class LossParts:
    """The loss of all tokens, in a loop over its parts.

        parts = LossParts(layer, tokens, wanted, by_token)
        for part in parts:
            parts.add(part, loss_of(part.numbers))
        loss = parts.total()

    With `by_token` the loss is a sum over tokens. If not, it is a sum over sequences: a part has
    all tokens of a sequence that are here, and the logits of a sequence that is longer than a chunk
    are computed twice. Ranks that hold parts of the same sequences walk together. The loss of a
    part is a scalar, equal on all ranks of the layer's group.
    """

    def __init__(
        self, layer: OutputLayer, tokens: Tokens, wanted: NumbersToCompute, by_token: bool
    ) -> None:
        self._layer = layer
        self._hidden = tokens.hidden
        self._projection = _Projection(layer, tokens, wanted)
        spans = self._projection.spans
        if by_token:
            spans = [_Span(span.rows, [chunk]) for span in spans for chunk in span.chunks]
        self._spans = spans
        self._added = 0  # parts that have a loss

        weight = layer.weight
        # The float32 sum of the weight's gradients, if it is not kept in the weight's own dtype.
        self._main_grad: Tensor | None = None
        if weight.dtype != torch.float32:
            self._main_grad = getattr(weight, "main_grad", None)
        self._loss = torch.zeros((), dtype=torch.float32, device=weight.device)
        self._grad_hidden = torch.empty_like(tokens.hidden)
        self._grad_weight: Tensor | None = None
        if weight.requires_grad:
            self._grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def __iter__(self) -> Iterator[LossPart]:
        for span in self._spans:
            with torch.no_grad():
                numbers, normalisers = self._projection.measure(span.chunks)
            leaves = {
                name: number.detach().requires_grad_()
                for name, number in vars(numbers).items()
                if number is not None and name != "sum_of_squares"
            }
            yield LossPart(span.rows, span.chunks, replace(numbers, **leaves), normalisers)

    def add(self, part: LossPart, loss: Tensor) -> None:
        """Add the loss of the part at which the loop is, and take its gradient."""
        leaves = {
            name: number
            for name, number in vars(part.numbers).items()
            if number is not None and number.requires_grad
        }
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients: dict[str, Any] = dict.fromkeys(vars(part.numbers))
        gradients |= zip(leaves, found, strict=True)
        if gradients["logprobs"] is None:
            gradients["logprobs"] = torch.zeros_like(part.numbers.logprobs)

        with torch.no_grad():
            self._loss += loss
            for rows, grad_logits in self._projection.grad_logits(part, TokenNumbers(**gradients)):
                self._add_products(rows, grad_logits.to(self._layer.weight.dtype))
        self._added += 1

    def total(self) -> Tensor:
        """The loss of all tokens, a scalar with gradients in the hidden states and the weight.

        Those in the hidden states come through this rank's columns; the caller sums over ranks.
        """
        assert self._added == len(self._spans), "a part has no loss"
        gradients = (self._grad_hidden, self._grad_weight, self._main_grad)
        return _KnownGradients.apply(self._loss, self._hidden, self._layer.weight, *gradients)

    def _add_products(self, rows: slice, grad_logits: Tensor) -> None:
        """Take the gradients that go through these logits, in the weight's dtype."""
        mm(grad_logits, self._layer.weight, self._grad_hidden[rows])
        if self._grad_weight is not None:
            add_mm(self._grad_weight, grad_logits.t(), self._hidden[rows])


@dataclass(frozen=True)
class _Span:
    """Whole sequences, as far as they are here, whose logits are computed chunk by chunk."""

    rows: slice  # the range of the sequences
    chunks: list[slice]  # their tokens, at least one chunk; it may be empty


class _Projection:
    """Computes the logits of some tokens, chunk by chunk, in one buffer for each model.

    They are float32 in a model of bfloat16 too, whose step between two logits of 16 to 32 is 0.125.
    """

    def __init__(self, layer: OutputLayer, tokens: Tokens, wanted: NumbersToCompute) -> None:
        assert wanted.kl == (tokens.references is not None)
        assert sum(tokens.lengths) == len(tokens.targets)
        self._layer = layer
        self._tokens = tokens
        self._wanted = wanted
        self._columns = layer.columns

        shard = len(layer.weight)
        row_bytes = shard * layer.weight.element_size()
        most_rows = chunk_rows(row_bytes, layer.weight.device.type)
        self.spans = _spans(tokens.lengths, tokens.most_lengths or tokens.lengths, most_rows)

        rows = max(chunk.stop - chunk.start for chunk in self.chunks)
        self._logits = layer.weight.new_empty((rows, shard), dtype=torch.float32)
        self._ref_logits: Tensor | None = None
        if tokens.references is not None:
            self._ref_logits = torch.empty_like(self._logits)
        self._held: slice | None = None
        # Of the chunks measured last, if their divergence is that of other distributions.
        self._subsets: list[Subset] = []

    @property
    def chunks(self) -> list[slice]:
        """The chunks of all spans."""
        return [chunk for span in self.spans for chunk in span.chunks]

    def measure(self, chunks: Sequence[slice]) -> tuple[TokenNumbers, Normalisers]:
        """The numbers of the tokens of consecutive chunks, and normalisers for their gradient."""
        tokens = self._tokens
        wanted = replace(self._wanted, kl=False) if self._wanted.apart else self._wanted
        first = chunks[0].start
        sums = LocalSums(chunks[-1].stop - first, self._columns, wanted, tokens.hidden.device)
        heads = []
        self._subsets = []
        for rows in chunks:
            logits, ref_logits = self._project(rows)
            compared = ref_logits if wanted.kl else None
            sums.add(rows.start - first, logits, tokens.targets[rows], compared)
            if tokens.heads is not None:
                heads.append(self._columns.at(logits, tokens.heads[rows]))
            if self._wanted.apart:
                assert ref_logits is not None
                both = (logits, ref_logits)
                subset = Subset.of(*both, self._columns, self._wanted, self._layer.group)
                self._subsets.append(subset)
        numbers, normalisers = sums.combine(self._layer.group)
        if heads:
            of_heads = self._sum(torch.cat(heads)).sub_(normalisers.policy[:, None])
            numbers = replace(numbers, heads=of_heads)
        if self._subsets:
            divergence = torch.cat([subset.divergence for subset in self._subsets])
            return replace(numbers, full_kl=divergence), normalisers
        return self._mixed(chunks, numbers, normalisers) if wanted.mixes else (numbers, normalisers)

    def _mixed(
        self, chunks: Sequence[slice], numbers: TokenNumbers, normalisers: Normalisers
    ) -> tuple[TokenNumbers, Normalisers]:
        """Both with the divergence from a mixture, which takes a second pass over the logits."""
        first = chunks[0].start
        sums = torch.zeros(2, len(numbers.logprobs), device=numbers.logprobs.device)
        for rows in chunks:
            logits, ref_logits = self._project(rows)
            assert ref_logits is not None
            inside = slice(rows.start - first, rows.stop - first)
            both = (logits, ref_logits)
            add_mixture(
                sums[:, inside], *both, self._columns, normalisers[inside], self._wanted.beta
            )
        self._sum(sums)
        return replace(numbers, full_kl=sums[0]), replace(normalisers, to_mixture=sums[1])

    def _sum(self, parts: Tensor) -> Tensor:
        """The sum of `parts`, which is overwritten, over the ranks of the layer's group."""
        if self._layer.group is not None and self._layer.group.size() > 1:
            dist.all_reduce(parts, group=self._layer.group)
        return parts

    def grad_logits(
        self, part: LossPart, grad_numbers: TokenNumbers
    ) -> Iterator[tuple[slice, Tensor]]:
        """The tokens of each chunk of the part measured last, and the gradient in their logits.

        `grad_numbers` is the gradient of the loss in each of its numbers.
        """
        first = part.chunks[0].start
        for number, rows in enumerate(part.chunks):
            logits, ref_logits = self._project(rows)
            inside = slice(rows.start - first, rows.stop - first)
            gradients = grad_numbers.tokens(inside)
            of_heads = gradients.heads
            if of_heads is not None:  # the softmax has the sum of both, the target its own alone
                in_heads = of_heads.sum(dim=1)
                gradients = replace(gradients, logprobs=gradients.logprobs + in_heads)
            cap = self._layer.cap
            through_cap = None if cap is None else cap_slopes(logits, cap)
            slope = None
            if self._wanted.apart and gradients.full_kl is not None:
                assert ref_logits is not None
                subset = self._subsets[number]
                subset.write_slope(logits, ref_logits, self._columns, self._wanted)
                slope = ref_logits.mul_(gradients.full_kl[:, None])
            write_gradient(
                logits,
                self._tokens.targets[rows],
                None if self._wanted.apart else ref_logits,
                self._columns,
                part.numbers.tokens(inside),
                replace(gradients, full_kl=None) if self._wanted.apart else gradients,
                part.normalisers[inside],
                self._wanted.beta,
            )
            if of_heads is not None:
                targets, heads = self._tokens.targets[rows, None], self._tokens.heads
                assert heads is not None
                self._columns.add_at(logits, targets, -in_heads[:, None])
                self._columns.add_at(logits, heads[rows], of_heads)
            if slope is not None:
                logits += slope
            if through_cap is not None:
                logits *= through_cap

            # The gradient has been written over the logits.
            self._held = None
            yield rows, logits

    def _project(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The logits of these tokens, and the reference's; the next call overwrites them."""
        tokens = self._tokens
        height = rows.stop - rows.start
        logits = self._logits[:height]
        ref_logits = None if self._ref_logits is None else self._ref_logits[:height]
        if self._held != rows:
            _multiply(tokens.hidden[rows], self._layer, logits)
            if ref_logits is not None:
                self._project_references(rows, ref_logits)
            self._mask(rows, logits, ref_logits)
            self._held = rows
        return logits, ref_logits

    def _project_references(self, rows: slice, ref_logits: Tensor) -> None:
        """Write the references' logits of these tokens."""
        end = 0
        for reference in self._tokens.references or ():
            begin = end
            end += len(reference.hidden)
            first = max(begin, rows.start)
            last = min(end, rows.stop)
            if first < last:
                logits = ref_logits[first - rows.start : last - rows.start]
                layer = reference.layer
                _multiply(reference.hidden[first - begin : last - begin], layer, logits)
                if layer.scale != self._layer.scale:  # sums scale both by the latter
                    logits.mul_(layer.scale / self._layer.scale)

    def _mask(self, rows: slice, *every: Tensor | None) -> None:
        """Give no probability to the tokens that could not be drawn."""
        if self._tokens.masks is None:
            return
        masks = self._tokens.masks.of_rows(rows)
        if not masks.cut_any:
            return
        columns = range(self._columns.first, self._columns.first + self._columns.valid)
        excluded = masks.excluded(columns, self._layer.vocab_size, self._logits.device)
        for logits in every:
            if logits is not None:
                logits[:, : len(columns)].masked_fill_(excluded, _EXCLUDED)


def _multiply(hidden: Tensor, layer: OutputLayer, logits: Tensor) -> None:
    """Write the layer's logits of the hidden states, without its scale."""
    mm(hidden, layer.weight.t(), logits)
    if layer.cap is not None:
        cap_logits(logits, layer.cap)


def _spans(lengths: Sequence[int], most_lengths: Sequence[int], most_rows: int) -> list[_Span]:
    """Cut tokens at the ends of sequences; at least one span.

    A span is one chunk of whole sequences, of at most `most_rows` tokens, or one longer sequence in
    as few chunks as possible, of nearly equal size.

    Ranks that cut the same sequences have the same `most_lengths`, on which alone the spans depend.
    """
    edges = [0]  # the first sequence of each span
    filled = 0
    for row, length in enumerate(most_lengths):
        if filled > 0 and filled + length > most_rows:
            edges.append(row)
            filled = 0
        filled += length
    edges.append(len(lengths))

    spans = []
    begin = 0
    for first, last in pairwise(edges):
        end = begin + sum(lengths[first:last])
        height = max(1, -(-(end - begin) // max(1, -(-(end - begin) // most_rows))))
        tops = range(begin, max(end, begin + 1), height)
        chunks = [slice(top, min(top + height, end)) for top in tops]
        spans.append(_Span(slice(first, last), chunks))
        begin = end
    return spans


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients have been computed with it; its one backward pass gives them."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        hidden: Tensor,
        weight: Tensor,
        grad_hidden: Tensor,
        grad_weight: Tensor | None,
        main_grad: Tensor | None,
    ) -> Tensor:
        ctx.gradients = (grad_hidden, grad_weight)
        ctx.main_grad = main_grad
        ctx.weight = weight
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the gradients have been handed on"
        grad_hidden, grad_weight = ctx.gradients
        # A schedule may hold the loss while it computes the next one, so memory is freed here.
        ctx.gradients = None
        if grad_weight is not None:
            grad_weight.mul_(grad_loss)
            if ctx.main_grad is not None:
                ctx.main_grad.add_(grad_weight)
                # Replicas exchange a gradient once autograd has given one, to which the embedding
                # may add. megatron-core then adds it only where that can be.
                ctx.weight.grad_added_to_main_grad = True
                grad_weight = ctx.weight.new_zeros(1).expand_as(ctx.weight)
            grad_weight = grad_weight.to(ctx.weight.dtype)
        return None, grad_hidden.mul_(grad_loss), grad_weight, None, None, None
