"""The slices of named tensors that a local parameter holds.

Reading, writing and resharding weights all use this one map. A tensor is known by its Hugging Face
name and its full shape. Along one dimension a parameter is a sequence of equal periods, and each
period holds one block of every named tensor that the parameter fuses. With tensor-parallel size t:

    parameter                                  periods         one period holds
    row-parallel or vocabulary weight          1 a rank        1/t of the tensor
    gate and up, in `linear_fc1`               1 a rank        1/t of gate, 1/t of up
    q, k and v, in `linear_qkv`                1 a KV head     its q rows, its k rows, its v rows
    the same with more ranks than KV heads     1 a rank        1/t of q, 1/t of k, 1/t of v
    the same with more ranks than KV heads,    1 a rank        1/t of q, and the k rows and v rows
    in an engine                                               of one KV head

With more ranks than KV heads a share of k or v is a part of one head. The ranks whose shares make
up a head are those whose q rows attend to it.

This is pure arithmetic on ints and shapes, and views into tensors that the caller hands in. This
file does not know models, process groups or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mrlhf.errors import WeightError

Shape = tuple[int, ...]
Key = tuple[str, int, int, int]


class Rule(NamedTuple):
    """How a parameter is made of named tensors."""

    # The fused tensors, in the order in which they follow each other in a period.
    names: tuple[str, ...]
    # The dimension that tensor parallelism splits; None if every rank holds the whole.
    dim: int | None
    # Number of periods in the whole (unsplit) parameter, which are divided over the ranks; None for
    # one period a rank. If there are more ranks, their number must be a multiple of the periods,
    # and each rank has a smaller period of its own.
    periods: int | None = None
    # Number of KV heads in each tensor after the first, if several ranks may hold the same one.
    # With more ranks than KV heads there is one period a rank, and neighbouring ranks hold the same
    # KV head. None if every tensor is split over all ranks.
    shared_kv_heads: int | None = None
    # Whether the first tensor, too, is of KV heads.
    of_kv_heads: bool = False
    # The rows [start, stop) along `dim` that the parameter holds of each tensor, which may then be
    # named several times; None for all rows of each.
    intervals: tuple[tuple[int, int], ...] | None = None
    # Whether the parameter belongs to one expert of a mixture. It is then split over the expert
    # tensor-parallel ranks, and held by other ranks than the dense parameters.
    of_expert: bool = False

    def interval(self, number: int, shapes: Mapping[str, Shape]) -> tuple[int, int]:
        """The rows along `dim` of the tensor `names[number]` that the parameter holds."""
        assert self.dim is not None
        if self.intervals is None:
            return 0, shapes[self.names[number]][self.dim]
        return self.intervals[number]

    def blocks(self, shapes: Mapping[str, Shape], tp_size: int) -> tuple[int, tuple[int, ...]]:
        """The number of periods on each of `tp_size` ranks, and each tensor's rows in a period.

        `dim` is not None. Vocabulary rows need not divide: the block is rounded up. A WeightError
        says that a fused parameter does not divide over the ranks.
        """
        intervals = [self.interval(number, shapes) for number in range(len(self.names))]
        sizes = [stop - start for start, stop in intervals]
        periods = self.periods or tp_size
        divides = periods % tp_size == 0
        if tp_size > periods:
            divides = tp_size % periods == 0
            periods = tp_size

        counts = [periods] * len(sizes)  # into how many blocks each tensor is cut, over all ranks
        if self.is_shared(tp_size):
            assert self.shared_kv_heads is not None
            divides = tp_size % self.shared_kv_heads == 0
            for number in range(self._first_of_kv_heads, len(sizes)):
                counts[number] = self.shared_kv_heads

        if len(sizes) > 1:
            for size, count in zip(sizes, counts, strict=True):
                divides = divides and size % count == 0
        if not divides:
            raise WeightError(self._refusal(sizes, tp_size))

        blocks = tuple(-(-size // count) for size, count in zip(sizes, counts, strict=True))
        return periods // tp_size, blocks

    @property
    def _first_of_kv_heads(self) -> int:
        """The number of the first tensor that is of KV heads, if any are."""
        return 0 if self.of_kv_heads else 1

    def shares(self, number: int, tp_size: int) -> bool:
        """Whether several of `tp_size` ranks hold the same rows of tensor `number`."""
        return self.is_shared(tp_size) and number >= self._first_of_kv_heads

    def is_shared(self, tp_size: int) -> bool:
        """Whether several of `tp_size` ranks hold the same KV head."""
        return self.shared_kv_heads is not None and tp_size > self.shared_kv_heads

    def _refusal(self, sizes: Sequence[int], tp_size: int) -> str:
        pairs = zip(self.names, sizes, strict=True)
        fused = ", ".join(f"{name} ({size} rows)" for name, size in pairs)
        count = self.shared_kv_heads or self.periods
        if count is None:
            remedy = "use a smaller tp"
        else:
            fused += f" in {count} blocks"
            remedy = (
                f"use a tp that divides {count}, or a multiple of {count} that divides the rows"
            )
        return f"{fused} do not divide over tensor-parallel size {tp_size}; {remedy}"


class Piece(NamedTuple):
    """A slice of a named tensor, and where it lies in the local parameter.

    The slice is the interval [start, stop) along `dim` of tensor `name`; every other dimension is
    whole. In the parameter it is cut into blocks of `block` rows. Each period of `period` rows
    holds one of them, `offset` rows after its beginning. `of_expert` is that of its `Rule`.
    """

    name: str
    full_shape: Shape
    dim: int
    start: int
    stop: int
    parameter: str
    offset: int
    block: int
    period: int
    of_expert: bool = False

    @property
    def key(self) -> Key:
        """The named slice, whatever parameter holds it: name, dim, start, stop."""
        return (self.name, self.dim, self.start, self.stop)

    def shape(self, start: int, stop: int) -> Shape:
        """Shape of the named tensor's sub-interval [start, stop)."""
        return (*self.full_shape[: self.dim], stop - start, *self.full_shape[self.dim + 1 :])


@dataclass(frozen=True)
class Slot:
    """A piece together with the tensor that stores it."""

    piece: Piece
    parameter: Tensor

    def load(self) -> Tensor:
        """The named slice, with the shape that it has in the named tensor."""
        piece = self.piece
        stored = self.view(piece.start, piece.stop)
        return stored.reshape(piece.shape(piece.start, piece.stop))

    def store(self, values: Tensor) -> None:
        """Overwrite the named slice; `values` may be of another dtype or device."""
        stored = self.view(self.piece.start, self.piece.stop)
        stored.copy_(values.reshape(stored.shape))

    def view(self, start: int, stop: int) -> Tensor:
        """The stored sub-interval [start, stop) of the named tensor, as a view.

        Its shape is the named slice's with `dim` split in (blocks, block rows);
        `reshape(piece.shape(start, stop))` of it is the slice itself. The interval must lie in one
        block or be made of whole blocks.
        """
        piece = self.piece
        assert piece.start <= start < stop <= piece.stop, (piece, start, stop)
        first = start - piece.start
        last = stop - piece.start
        periods = self.parameter.detach().unflatten(piece.dim, (-1, piece.period))
        first_period = first // piece.block

        if first_period == (last - 1) // piece.block:
            offset = piece.offset + first % piece.block
            period = periods.narrow(piece.dim, first_period, 1)
            return period.narrow(piece.dim + 1, offset, last - first)

        assert first % piece.block == 0 and last % piece.block == 0, (piece, start, stop)
        covered = periods.narrow(piece.dim, first_period, (last - first) // piece.block)
        return covered.narrow(piece.dim + 1, piece.offset, piece.block)


def pieces_of(
    parameter: str, rule: Rule, shapes: Mapping[str, Shape], tp_rank: int, tp_size: int
) -> tuple[Piece, ...]:
    """The pieces that tensor-parallel rank `tp_rank` of `tp_size` holds in `parameter`.

    For a parameter of an expert these are the rank and size of expert tensor parallelism.
    Vocabulary rows need not divide: each rank has ceil(vocab / tp_size) rows, and the padding rows
    of the last rank belong to no piece. A WeightError says that a fused parameter does not divide.
    """
    if rule.dim is None:
        (name,) = rule.names
        shape = shapes[name]
        rows = shape[0]
        return (Piece(name, shape, 0, 0, rows, parameter, 0, rows, rows, of_expert=rule.of_expert),)

    periods, blocks = rule.blocks(shapes, tp_size)
    pieces = []
    offset = 0
    for number, (name, block) in enumerate(zip(rule.names, blocks, strict=True)):
        shape = shapes[name]
        first, last = rule.interval(number, shapes)
        size = last - first
        place = tp_rank
        if rule.shares(number, tp_size):
            place = tp_rank * (size // block) // tp_size

        # The last ranks hold fewer rows of a tensor that is padded, or none.
        start = first + min(size, place * periods * block)
        stop = first + min(size, (place + 1) * periods * block)
        if start < stop:
            valid = min(block, stop - start)
            period = sum(blocks)
            place_in = (parameter, offset, valid, period, rule.of_expert)
            pieces.append(Piece(name, shape, rule.dim, start, stop, *place_in))
        offset += block
    return tuple(pieces)


def local_shape(rule: Rule, shapes: Mapping[str, Shape], tp_size: int) -> Shape:
    """The shape of a parameter on each of `tp_size` ranks, vocabulary padding included."""
    full = shapes[rule.names[0]]
    if rule.dim is None:
        return full
    periods, blocks = rule.blocks(shapes, tp_size)
    return (*full[: rule.dim], periods * sum(blocks), *full[rule.dim + 1 :])
