"""The boxes of named tensors that lie in a range of a flat parameter, and their places in it.

The distributed optimizer cuts a parameter, seen as one row of numbers, anywhere. A range of it is a
partial row, whole rows and another partial row; each of these is a box of every named tensor that
the parameter fuses. So a rank's share can be stored, and found again, by name and box, whatever the
layout. This is pure arithmetic on ints and shapes. It knows no tensors, files or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mrlhf.weights.shard import Piece, Shape


@dataclass(frozen=True)
class Box:
    """The intervals [start, stop) along each dimension of a named tensor."""

    name: str
    starts: Shape
    stops: Shape

    @property
    def shape(self) -> Shape:
        """Elements along each dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        """The box in one word, such as `model.norm.weight[0:64]`."""
        pairs = zip(self.starts, self.stops, strict=True)
        return f"{self.name}[{','.join(f'{start}:{stop}' for start, stop in pairs)}]"

    def intersection(self, other: Box) -> Box | None:
        """The elements that both boxes of one tensor hold, or None."""
        assert self.name == other.name, (self, other)
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(self.name, starts, stops)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds `outer`."""
        places = zip(self.starts, self.stops, outer.starts, strict=True)
        return tuple(slice(start - origin, stop - origin) for start, stop, origin in places)


@dataclass(frozen=True)
class StoredBox:
    """A box, and where its elements lie in a flat parameter."""

    box: Box
    # Intervals of the flat parameter; one after the other they are the box, row by row.
    runs: tuple[tuple[int, int], ...]


def whole(name: str, shape: Shape) -> Box:
    """The box that holds all of a tensor."""
    return Box(name, (0,) * len(shape), shape)


def boxes_in(piece: Piece, parameter_shape: Shape, start: int, stop: int) -> list[StoredBox]:
    """The boxes of `piece`'s named tensor in elements [start, stop) of a flat parameter.

    The named tensor has one or two dimensions, or others of size 1 between these;
    `parameter_shape` is that of the parameter that holds the piece.
    """
    assert len(parameter_shape) == len(piece.full_shape), (piece, parameter_shape)
    assert all(size == 1 for size in parameter_shape[1:-1]), (piece, parameter_shape)
    columns = math.prod(parameter_shape[1:])
    stored = []
    for first_row, last_row, first, last in _rectangles(start, stop, columns):
        if piece.dim == 0:
            box, runs = _row_box(piece, columns, first_row, last_row, first, last)
        else:
            box, runs = _column_box(piece, columns, first_row, last_row, first, last)
        if runs:
            stored.append(StoredBox(box, runs))
    return stored


def _rectangles(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut [start, stop) into pieces of a row and runs of whole rows, in order.

    Each is (first row, end row, first column, end column).
    """
    while start < stop:
        row, column = divmod(start, columns)
        if column or stop - start < columns:
            last = min(columns, column + stop - start)
            yield row, row + 1, column, last
            start += last - column
        else:
            rows = (stop - start) // columns
            yield row, row + rows, 0, columns
            start += rows * columns


def _row_box(
    piece: Piece, columns: int, first_row: int, last_row: int, first: int, last: int
) -> tuple[Box, tuple[tuple[int, int], ...]]:
    """The box of a piece that is split along rows, and its runs; no runs if it is empty."""
    begin = _rows_before(piece, first_row)
    end = _rows_before(piece, last_row)

    runs = []
    row = begin
    while row < end:
        period, place = divmod(row, piece.block)
        count = min(piece.block - place, end - row)
        offset = (period * piece.period + piece.offset + place) * columns
        runs.append((offset + first, offset + (count - 1) * columns + last))
        row += count

    starts: Shape = (piece.start + begin,)
    stops: Shape = (piece.start + end,)
    if len(piece.full_shape) > 1:
        between = piece.full_shape[1:-1]
        starts = (*starts, *(0 for _ in between), first)
        stops = (*stops, *between, last)
    return Box(piece.name, starts, stops), tuple(runs)


def _column_box(
    piece: Piece, columns: int, first_row: int, last_row: int, first: int, last: int
) -> tuple[Box, tuple[tuple[int, int], ...]]:
    """The box of a piece that is split along columns, and its one run."""
    assert piece.offset == 0 and piece.block == piece.period == columns, piece
    box = Box(piece.name, (first_row, piece.start + first), (last_row, piece.start + last))
    return box, ((first_row * columns + first, (last_row - 1) * columns + last),)


def _rows_before(piece: Piece, row: int) -> int:
    """The number of the piece's rows that lie before row `row` of the parameter."""
    period, place = divmod(row, piece.period)
    before = period * piece.block + min(max(place - piece.offset, 0), piece.block)
    return min(before, piece.stop - piece.start)
