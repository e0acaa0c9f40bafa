"""The output layer of a language model, and losses of the distributions that it gives.

Hidden states are projected onto the vocabulary, which is split over tensor-parallel ranks, a chunk
of tokens at a time. A few numbers for each token remain of a chunk's logits, so no tensor of
[tokens, vocab] is ever made.

For training, a loss of these numbers is evaluated as soon as the numbers are there, and its
gradient is taken while the logits are. A chunk holds whole sequences wherever they are short
enough, so that a loss over whole sequences needs the logits once. Where several ranks hold parts of
each sequence, all of them cut between the same sequences. This file knows no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.host.products import add_mm, mm
from mrlhf.parallel.vocab_sums import (
    Columns,
    LocalSums,
    Normalisers,
    NumbersToCompute,
    TokenNumbers,
    write_gradient,
)

# Size of the logits of a chunk. The matrix products want many rows, memory wants few.
_CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}
_LEAST_CHUNK_TOKENS = 128


def chunk_rows(row_bytes: int, device: str) -> int:
    """The most tokens of a chunk whose logits take so many bytes each, on this type of device."""
    return max(_LEAST_CHUNK_TOKENS, _CHUNK_BYTES[device] // row_bytes)


class TokenRange(NamedTuple):
    """Consecutive tokens whose loss is evaluated at once."""

    tokens: slice  # their range among this rank's tokens
    rows: slice  # the range of the sequences that they belong to


Objective = Callable[[TokenRange, TokenNumbers], Tensor]
"""Takes some of the tokens and their numbers, which have gradients; gives their loss, a scalar."""


@dataclass(frozen=True)
class OutputLayer:
    """This rank's shard of the projection onto the vocabulary."""

    # [vocab_shard, hidden]. Rank r of the group holds the rows from r * vocab_shard on. Rows from
    # `vocab_size` on are padding: they have probability and gradient 0.
    weight: Tensor
    group: dist.ProcessGroup | None  # that holds the shards; None if this rank holds all rows
    vocab_size: int  # number of rows over all ranks, without padding
    scale: float  # multiplies the products

    @property
    def columns(self) -> Columns:
        """The columns of the logits on this rank."""
        shard = len(self.weight)
        first = 0 if self.group is None else self.group.rank() * shard
        return Columns(first, max(0, min(shard, self.vocab_size - first)), self.scale)


@dataclass(frozen=True)
class Tokens:
    """Some tokens, and the hidden states that their distributions are computed from."""

    hidden: Tensor  # [tokens, hidden], equal on all ranks of the output layer's group
    targets: Tensor  # int64 [tokens], each in [0, vocab_size)
    lengths: Sequence[int]  # tokens of each sequence here, one sequence after the other
    ref_layer: OutputLayer | None = None  # the output layer of the reference, for the KL to it
    ref_hidden: Tensor | None = None  # [tokens, hidden], the hidden states of the reference
    # The most tokens that each has on any of the ranks that hold parts of it; None if this rank
    # holds them whole.
    most_lengths: Sequence[int] | None = None


@torch.no_grad()
def token_numbers(layer: OutputLayer, tokens: Tokens, wanted: NumbersToCompute) -> TokenNumbers:
    """The numbers of each token, equal on all ranks of the layer's group.

    They are equal, bit for bit, to those that `token_loss` computes from the same tokens.
    """
    projection = _Projection(layer, tokens, wanted)
    return projection.measure(projection.chunks)[0]


def token_loss(
    layer: OutputLayer,
    tokens: Tokens,
    wanted: NumbersToCompute,
    objective: Objective,
    by_token: bool,
) -> Tensor:
    """The loss of all tokens, a scalar with gradients in the hidden states and the weight.

    A frozen weight gets none.

    The gradient in the hidden states is that through this rank's columns; the caller sums over the
    ranks of the group.

    The objective reads the numbers that are `wanted`, and is equal on all ranks of the group. With
    `by_token` it is a sum over tokens. If not, it is a sum over sequences: it gets all tokens of a
    sequence that are here, and the logits of a sequence that is longer than a chunk are computed
    twice. Ranks that hold parts of the same sequences call it together.
    """
    hidden = tokens.hidden
    weight = layer.weight
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    with torch.no_grad():
        projection = _Projection(layer, tokens, wanted)
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        if weight.requires_grad:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        spans = projection.spans
        if by_token:
            spans = [_Span(span.rows, [chunk]) for span in spans for chunk in span.chunks]

        for span in spans:
            numbers, normalisers = projection.measure(span.chunks)
            part_loss, grad_numbers = _differentiate(objective, span.token_range, numbers)
            loss += part_loss
            for rows, grad_logits in projection.grad_logits(
                span.chunks, numbers, grad_numbers, normalisers
            ):
                mm(grad_logits, weight, grad_hidden[rows])
                if grad_weight is not None:
                    add_mm(grad_weight, grad_logits.t(), hidden[rows])
    return _KnownGradients.apply(loss, hidden, weight, grad_hidden, grad_weight)


@dataclass(frozen=True)
class _Span:
    """Whole sequences, as far as they are here, whose logits are computed chunk by chunk."""

    rows: slice  # the range of the sequences
    chunks: list[slice]  # their tokens, at least one chunk; it may be empty

    @property
    def token_range(self) -> TokenRange:
        """All tokens of the span."""
        return TokenRange(slice(self.chunks[0].start, self.chunks[-1].stop), self.rows)


class _Projection:
    """Computes the logits of some tokens, chunk by chunk, in one buffer for each model."""

    def __init__(self, layer: OutputLayer, tokens: Tokens, wanted: NumbersToCompute) -> None:
        assert wanted.kl == (tokens.ref_layer is not None) == (tokens.ref_hidden is not None)
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
        shape = (rows, shard)
        self._logits = layer.weight.new_empty(shape)
        self._ref_logits: Tensor | None = None
        if tokens.ref_layer is not None:
            # The reference may have another dtype.
            self._ref_logits = tokens.ref_layer.weight.new_empty(shape)
        self._held: slice | None = None

    @property
    def chunks(self) -> list[slice]:
        """The chunks of all spans."""
        return [chunk for span in self.spans for chunk in span.chunks]

    def measure(self, chunks: Sequence[slice]) -> tuple[TokenNumbers, Normalisers]:
        """The numbers of the tokens of consecutive chunks, and normalisers for their gradient."""
        tokens = self._tokens
        first = chunks[0].start
        sums = LocalSums(chunks[-1].stop - first, self._columns, self._wanted, tokens.hidden.device)
        for rows in chunks:
            logits, ref_logits = self._project(rows)
            sums.add(rows.start - first, logits, tokens.targets[rows], ref_logits)
        return sums.combine(self._layer.group)

    def grad_logits(
        self,
        chunks: Sequence[slice],
        numbers: TokenNumbers,
        grad_numbers: TokenNumbers,
        normalisers: Normalisers,
    ) -> Iterator[tuple[slice, Tensor]]:
        """The tokens of each of the chunks measured last, and the gradient in their logits.

        `grad_numbers` is the gradient of the loss in each of their `numbers`.
        """
        first = chunks[0].start
        for rows in chunks:
            logits, ref_logits = self._project(rows)
            inside = slice(rows.start - first, rows.stop - first)
            write_gradient(
                logits,
                self._tokens.targets[rows],
                ref_logits,
                self._columns,
                numbers.tokens(inside),
                grad_numbers.tokens(inside),
                normalisers[inside],
            )

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
            mm(tokens.hidden[rows], self._layer.weight.t(), logits)
            if ref_logits is not None:
                assert tokens.ref_layer is not None and tokens.ref_hidden is not None
                mm(tokens.ref_hidden[rows], tokens.ref_layer.weight.t(), ref_logits)
            self._held = rows
        return logits, ref_logits


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


def _differentiate(
    objective: Objective, token_range: TokenRange, numbers: TokenNumbers
) -> tuple[Tensor, TokenNumbers]:
    """The loss of these tokens, and its gradient in each of their numbers."""
    leaves = {
        name: number.detach().requires_grad_()
        for name, number in vars(numbers).items()
        if number is not None and name != "sum_of_squares"
    }
    with torch.enable_grad():
        loss = objective(token_range, replace(numbers, **leaves))
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)

    gradients = dict(zip(leaves, found, strict=True))
    grad_logprobs = gradients["logprobs"]
    return loss.detach(), TokenNumbers(
        logprobs=torch.zeros_like(numbers.logprobs) if grad_logprobs is None else grad_logprobs,
        entropy=gradients.get("entropy"),
        full_kl=gradients.get("full_kl"),
        sum_of_squares=None,
    )


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
    ) -> Tensor:
        ctx.gradients = (grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the gradients have been handed on"
        grad_hidden, grad_weight = ctx.gradients
        # A schedule may hold the loss while it computes the next one, so memory is freed here.
        ctx.gradients = None
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.dtype)
        return None, grad_hidden.mul_(grad_loss), grad_weight, None, None
