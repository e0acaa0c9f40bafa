"""What the kernels of a run take on one rank, as measured; it knows shapes, and no layouts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Product(NamedTuple):
    """The speed of one matrix product, [rows, inner] times [inner, columns]."""

    rows: int
    inner: int
    columns: int
    tflops: float  # 10¹² operations a second, two for each multiplication and addition


@dataclass(frozen=True)
class ProductTable:
    """The speed of products of any shape, from measured shapes that form a grid."""

    products: tuple[Product, ...]

    def seconds(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of one product; beyond the grid, the speed is that of its border."""
        shape = (rows, inner, columns)
        if min(shape) <= 0:
            return 0.0
        corners: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        for axis, size in zip(self._axes, shape, strict=True):
            corners = [
                (weight * share, (*corner, point))
                for weight, corner in corners
                for point, share in _between(axis, size)
            ]
        speed = math.exp(sum(weight * self._logs[corner] for weight, corner in corners))
        return 2 * rows * inner * columns / (1e12 * speed)

    @cached_property
    def _axes(self) -> tuple[list[int], ...]:
        columns = list(zip(*self.products, strict=True))[:3]
        return tuple(sorted({int(size) for size in column}) for column in columns)

    @cached_property
    def _logs(self) -> dict[tuple[int, ...], float]:
        return {tuple(product[:3]): math.log(product.tflops) for product in self.products}

    @property
    def is_grid(self) -> bool:
        """Whether there is exactly one product for each combination of sizes."""
        full = math.prod(map(len, self._axes)) if self.products else 0
        return len(self.products) == len(self._logs) == full > 0


def _between(axis: Sequence[int], size: float) -> list[tuple[int, float]]:
    """The points of an axis beside a size, with their shares by the logarithm of the distance."""
    place = bisect_right(axis, size)
    if place == 0 or place == len(axis):
        return [(axis[min(place, len(axis) - 1)], 1.0)]
    low, high = axis[place - 1 : place + 1]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


@dataclass(frozen=True)
class Kernels:
    """Speeds and fixed costs of the kernels that a run calls, on one rank.

    Fixed costs are what remains when the work is tiny: the launch of kernels and Python's own time.
    """

    products: ProductTable  # of training
    engine_products: ProductTable  # of generation, whose weights may lie otherwise in memory
    attention_tflops: float  # 10¹² operations a second of attention
    attention_backward_tflops: float
    streamed_gb_s: float  # 10⁹ bytes a second of activations, norms, residuals and gradients
    logits_g_s: float  # 10⁹ logits a second that become log-probabilities, products aside
    logits_backward_g_s: float  # the same with their gradient
    update_gb_s: float  # 10⁹ bytes a second that AdamW reads and writes
    lay_out_gb_s: float  # 10⁹ bytes of weights a second that the engine makes ready
    layer_s: float  # fixed cost of a layer, in a forward pass
    layer_backward_s: float
    pack_s: float  # of a micro-batch beside its layers, in a forward pass
    pack_backward_s: float
    step_s: float  # of an optimizer step
    engine_keys_gb_s: float  # 10⁹ bytes of keys and values a second that a new token attends to
    engine_layer_s: float  # of a layer, in a pass of the engine
    engine_pass_s: float  # of such a pass beside its layers
    engine_row_s: float  # of each row that draws a token in it


def flat_kernels(tflops: float, memory_gb_s: float) -> Kernels:
    """Kernels of which only the peak of products and of memory are known.

    All products and attention have one speed, and all that passes through memory another. Logits
    and fixed costs are not counted.
    """
    table = ProductTable((Product(1, 1, 1, tflops),))
    never = math.inf
    return Kernels(
        table, table, tflops, tflops, memory_gb_s, never, never, memory_gb_s, never,
        0.0, 0.0, 0.0, 0.0, 0.0, memory_gb_s, 0.0, 0.0, 0.0,
    )  # fmt: skip
