"""Which slice of which named tensor a local parameter holds: the one map behind reading, writing
and resharding.

The lingua franca is the Hugging Face name and full shape of each tensor. Along one dimension a
parameter is a train of periods; each period holds one block of every named tensor it fuses. Four
examples, tensor-parallel size t:

    row-parallel or vocabulary weight   one period a rank, one tensor in it gate and up in
    `linear_fc1`         one period a rank: [gate rows / t, up rows / t] q, k, v in `linear_qkv`
    one period a KV group: [q rows of the group, k rows, v rows] q, k, v, shared by inference ranks
    more ranks than KV groups: one period a rank, [q rows / t, k rows of its group,
                                        v rows of its group]

Pure arithmetic on ints and shapes, plus views into tensors that the caller hands in. It does not
know models, process groups or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mrlhf.errors import WeightError

Shape = tuple[int, ...]
Key = tuple[str, int, int, int]


@dataclass(frozen=True)
class Rule:
    """How a parameter is made of named tensors.

    Attributes:
        names: the fused tensors, in the order they follow each other in a period.
        dim: the dimension that tensor parallelism splits; None where every rank holds the whole.
        periods: periods in the whole (unsplit) parameter, divided over the ranks; None for one
            period a rank.
        shares: the tensors after the first are cut in at most so many shares. On more ranks there
            is one period a rank, and neighbouring ranks hold the same share of them. None where
            every tensor is split over all ranks.
    """

    names: tuple[str, ...]
    dim: int | None
    periods: int | None = None
    shares: int | None = None

    def blocks(self, shapes: Mapping[str, Shape], tp_size: int) -> tuple[int, tuple[int, ...]]:
        """Periods on each of `tp_size` ranks, and the rows of each tensor's block in a period;
        `dim` is not None.

        Vocabulary rows need not divide: the block is rounded up.

        Raises:
            WeightError: a fused or grouped parameter does not divide over the ranks.
        """
        assert self.dim is not None
        sizes = [shapes[name][self.dim] for name in self.names]
        periods = self.periods or tp_size
        counts = [periods] * len(sizes)
        if self.is_shared(tp_size):
            assert self.shares is not None
            periods, counts = tp_size, [tp_size] + [self.shares] * (len(sizes) - 1)
        uneven = len(sizes) > 1 and any(
            size % count for size, count in zip(sizes, counts, strict=True)
        )
        if periods % tp_size or uneven or (self.is_shared(tp_size) and tp_size % counts[-1]):
            raise WeightError(self._refusal(sizes, tp_size))
        return periods // tp_size, tuple(
            -(-size // count) for size, count in zip(sizes, counts, strict=True)
        )

    def is_shared(self, tp_size: int) -> bool:
        """Whether several of `tp_size` ranks hold the same share of the tensors after the first."""
        return self.shares is not None and tp_size > self.shares

    def _refusal(self, sizes: Sequence[int], tp_size: int) -> str:
        rows = ", ".join(
            f"{name} ({size} rows)" for name, size in zip(self.names, sizes, strict=True)
        )
        groups = self.shares or self.periods
        if groups is None:
            remedy = "use a smaller tp"
        elif self.shares is None:
            remedy = f"use a tp that divides {groups}"
        else:
            remedy = (
                f"use a tp that divides {groups}, or a multiple of {groups} that divides the rows"
            )
        grouped = "" if groups is None else f" in {groups} groups"
        return f"{rows}{grouped} do not divide over tensor-parallel size {tp_size}; {remedy}"


@dataclass(frozen=True)
class Piece:
    """The interval [start, stop) along `dim` of tensor `name`, and where it lies in the local
    parameter.

    Every other dimension is whole. In the parameter the interval is cut into blocks of `block`
    rows, one a period of `period` rows, each `offset` rows after the period's beginning.
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

    @property
    def key(self) -> Key:
        """Identity of the named slice, whatever parameter holds it: name, dim, start, stop."""
        return (self.name, self.dim, self.start, self.stop)

    def shape(self, start: int, stop: int) -> Shape:
        """Shape of the named tensor's sub-interval [start, stop)."""
        return (*self.full_shape[: self.dim], stop - start, *self.full_shape[self.dim + 1 :])


@dataclass(frozen=True)
class Slot:
    """A piece together with the tensor that stores it."""

    piece: Piece
    parameter: Tensor

    def view(self, start: int, stop: int) -> Tensor:
        """The stored sub-interval [start, stop) of the named tensor, as a view.

        Its shape is the named slice's with `dim` split in (blocks, block rows);
        `reshape(piece.shape(start, stop))` of it is the slice itself. The interval must lie in one
        block or be made of whole blocks.
        """
        piece = self.piece
        assert piece.start <= start < stop <= piece.stop, (piece, start, stop)
        first, last = start - piece.start, stop - piece.start
        folded = self.parameter.detach().unflatten(piece.dim, (-1, piece.period))
        if first // piece.block == (last - 1) // piece.block:
            head = piece.offset + first % piece.block
            block = folded.narrow(piece.dim, first // piece.block, 1)
            return block.narrow(piece.dim + 1, head, last - first)
        assert first % piece.block == 0 and last % piece.block == 0, (piece, start, stop)
        blocks = folded.narrow(piece.dim, first // piece.block, (last - first) // piece.block)
        return blocks.narrow(piece.dim + 1, piece.offset, piece.block)


def pieces_of(
    parameter: str, rule: Rule, shapes: Mapping[str, Shape], tp_rank: int, tp_size: int
) -> tuple[Piece, ...]:
    """The pieces that tensor-parallel rank `tp_rank` of `tp_size` holds in `parameter`.

    Vocabulary rows need not divide: each rank has ceil(vocab / tp_size) rows and the last rank's
    padding rows belong to no piece.

    Raises:
        WeightError: a fused or grouped parameter does not divide over the ranks.
    """
    if rule.dim is None:
        (name,) = rule.names
        shape = shapes[name]
        return (
            Piece(
                name, shape, 0, 0, shape[0], parameter, offset=0, block=shape[0], period=shape[0]
            ),
        )
    periods, blocks = rule.blocks(shapes, tp_size)
    pieces, offset = [], 0
    for number, (name, block) in enumerate(zip(rule.names, blocks, strict=True)):
        shape, share = shapes[name], tp_rank
        if number > 0 and rule.is_shared(tp_size):
            share = tp_rank * (shape[rule.dim] // block) // tp_size
        start, stop = (min(shape[rule.dim], edge * periods * block) for edge in (share, share + 1))
        if start < stop:
            # Only the last rank's rows of a tensor that is padded are fewer than its blocks.
            valid = min(block, stop - start)
            pieces.append(
                Piece(name, shape, rule.dim, start, stop, parameter, offset, valid, sum(blocks))
            )
        offset += block
    return tuple(pieces)


def local_shape(rule: Rule, shapes: Mapping[str, Shape], tp_size: int) -> Shape:
    """The shape of a parameter on each of `tp_size` ranks, vocabulary padding included.

    Raises:
        WeightError: a fused or grouped parameter does not divide over the ranks.
    """
    full = shapes[rule.names[0]]
    if rule.dim is None:
        return full
    periods, blocks = rule.blocks(shapes, tp_size)
    return (*full[: rule.dim], periods * sum(blocks), *full[rule.dim + 1 :])
