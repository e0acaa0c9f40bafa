"""Which slice of which named tensor a local parameter holds: the one map behind reading, writing and resharding.

The lingua franca is the Hugging Face name and full shape of each tensor. Along one dimension a parameter is a train of
periods; each period holds one block of every named tensor it fuses. Three examples, tensor-parallel size t:

    row-parallel or vocabulary weight   one period a rank, one tensor in it
    gate and up in `linear_fc1`         one period a rank: [gate rows / t, up rows / t]
    q, k, v in `linear_qkv`             one period a KV group: [q rows of the group, k rows, v rows]

Pure arithmetic on ints and shapes, plus views into tensors that the caller hands in. It does not know models, process
groups or files.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        periods: periods in the whole (unsplit) parameter, divided over the ranks; None for one period a rank.
    """

    names: tuple[str, ...]
    dim: int | None
    periods: int | None = None


@dataclass(frozen=True)
class Piece:
    """The interval [start, stop) along `dim` of tensor `name`, and where it lies in the local parameter.

    Every other dimension is whole. In the parameter the interval is cut into blocks of `block` rows, one a period of
    `period` rows, each `offset` rows after the period's beginning.
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

        Its shape is the named slice's with `dim` split in (blocks, block rows); `reshape(piece.shape(start, stop))`
        of it is the slice itself. The interval must lie in one block or be made of whole blocks.
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


def pieces_of(parameter: str, rule: Rule, shapes: Mapping[str, Shape], tp_rank: int, tp_size: int) -> tuple[Piece, ...]:
    """The pieces that tensor-parallel rank `tp_rank` of `tp_size` holds in `parameter`.

    Vocabulary rows need not divide: each rank has ceil(vocab / tp_size) rows and the last rank's padding rows belong to
    no piece.

    Raises:
        WeightError: a fused or grouped parameter does not divide over the ranks.
    """
    full = [shapes[name] for name in rule.names]
    if rule.dim is None:
        (name,), (shape,) = rule.names, full
        return (Piece(name, shape, 0, 0, shape[0], parameter, offset=0, block=shape[0], period=shape[0]),)
    periods = rule.periods or tp_size
    sizes = [shape[rule.dim] for shape in full]
    blocks = [-(-size // periods) for size in sizes]
    fused = len(rule.names) > 1
    if periods % tp_size or (fused and any(size % periods for size in sizes)):
        raise WeightError(
            f"{parameter}: {dict(zip(rule.names, sizes, strict=True))} rows in {periods} periods do not divide over "
            f"tensor-parallel size {tp_size}; use a smaller tp"
        )
    local = periods // tp_size
    pieces, offset = [], 0
    for name, shape, size, block in zip(rule.names, full, sizes, blocks, strict=True):
        start, stop = min(size, tp_rank * local * block), min(size, (tp_rank + 1) * local * block)
        if start < stop:
            valid = block if fused or stop - start == local * block else stop - start
            pieces.append(Piece(name, shape, rule.dim, start, stop, parameter, offset, valid, sum(blocks)))
        offset += block
    return tuple(pieces)
