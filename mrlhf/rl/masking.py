"""Sums, means, moments and whitening over the positions that a mask keeps.

A masked-out position never counts, whatever it holds, NaN included. Whitening of values that are
spread over several ranks takes two steps: each rank takes the moments of its part, the caller
gathers and merges them, and every rank whitens with the merged moments. This file does not know
what the values mean, nor that there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and centred sum of squares of a set of numbers.

    Centred sums can be merged without cancellation. A plain sum of squares loses digits where the
    mean is large beside the spread.
    """

    count: int
    mean: float
    centred_squares: float

    @property
    def variance(self) -> float:
        """Unbiased variance; 0 for fewer than two numbers, which have no spread."""
        return self.centred_squares / (self.count - 1) if self.count > 1 else 0.0

    def to_tensor(self) -> Tensor:
        """float64 [3]: count, mean, centred squares; the form to gather over ranks."""
        return torch.tensor(
            [self.count, self.mean, self.centred_squares], dtype=torch.float64, device="cpu"
        )

    @staticmethod
    def from_tensor(tensor: Tensor) -> Moments:
        """The inverse of `to_tensor`."""
        count, mean, centred_squares = tensor.tolist()
        return Moments(int(count), mean, centred_squares)


def working_dtype(x: Tensor) -> torch.dtype:
    """The type of results made from `x`: its own, but a floating-point one of at least 32 bits."""
    return torch.promote_types(x.dtype, torch.float32)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` where the bool `mask` is True, in its `working_dtype`; over all axes or `dim`."""
    _check_mask(x, mask)
    kept = x.to(working_dtype(x)).masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` where `mask` is True, 0 where the mask is empty; arguments as in `masked_sum`."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def selected(x: Tensor, mask: Tensor) -> Tensor:
    """`x[mask]`: the entries of `x` where `mask` is True, flat and without a gradient."""
    x = x.detach()
    if x.device.type != "cpu" or x.dtype == torch.bfloat16:
        return x[mask]
    # NumPy takes them some ten times as fast as torch does.
    return torch.from_numpy(x.numpy()[mask.numpy()])


def local_moments(x: Tensor, mask: Tensor) -> Moments:
    """Moments of the entries of `x` where `mask` is True, in float64 and in two passes."""
    _check_mask(x, mask)
    kept = selected(x, mask).double()
    if kept.numel() == 0:
        return Moments(0, 0.0, 0.0)

    mean = kept.mean()
    centred = kept - mean
    return Moments(kept.numel(), float(mean), float(centred.dot(centred)))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of disjoint sets, from the moments of each; all zero without a set.

    Pairwise update of Chan, Golub and LeVeque,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    """
    merged = Moments(0, 0.0, 0.0)
    for part in parts:
        count = merged.count + part.count
        if count == 0:
            continue

        delta = part.mean - merged.mean
        mean = merged.mean + delta * part.count / count
        between = delta**2 * merged.count * part.count / count
        centred_squares = merged.centred_squares + part.centred_squares + between
        merged = Moments(count, mean, centred_squares)

    return merged


def whiten(x: Tensor, mask: Tensor, moments: Moments, shift_mean: bool = True) -> Tensor:
    """Scale `x` to unit variance and, with `shift_mean`, to zero mean; 0 outside the mask.

    `moments` are those of the whole set that `x` belongs to, which may be larger than `x`.
    """
    _check_mask(x, mask)
    white = (x.double() - moments.mean).div_((moments.variance + WHITEN_EPS) ** 0.5)
    if not shift_mean:
        white = white + moments.mean
    return white.to(working_dtype(x)).masked_fill_(~mask, 0)


def _check_mask(x: Tensor, mask: Tensor) -> None:
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"
    assert mask.shape == x.shape, f"mask {tuple(mask.shape)} does not fit values {tuple(x.shape)}"
