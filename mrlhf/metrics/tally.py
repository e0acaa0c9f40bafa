"""Sums and counts by name, which ranks and micro-batches add up before a mean is taken.

This file does not know which ranks there are: to merge over ranks, the caller adds vectors up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_FEWEST_ROWS = 8


class Tally:
    """Sums by name. Most have a count, by which they are divided once all are merged."""

    def __init__(self) -> None:
        # A sum stays a tensor until it is read, so that adding never waits for a device.
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float | None = None) -> None:
        """Add scalars: `total`, a sum over `count` items; without a count the sum is reported."""
        self._sums[name] = self._sums.get(name, 0.0) + _detached(total)
        if count is not None:
            self._counts[name] = self._counts.get(name, 0.0) + _detached(count)

    def merge(self, other: Tally) -> None:
        """Add all entries of `other`."""
        for name, total in other._sums.items():
            self.add(name, total, other._counts.get(name))

    def finite(self) -> Tally:
        """The entries whose sum is a finite number."""
        kept = Tally()
        for name, total in self._sums.items():
            if math.isfinite(float(total)):
                kept.add(name, total, self._counts.get(name))
        return kept

    def values(self) -> dict[str, float]:
        """The mean of each name, NaN where nothing was counted; the sum itself without a count."""
        values: dict[str, float] = {}
        for name, total in self._sums.items():
            if name in self._counts:
                values[name] = quotient(float(total), float(self._counts[name]))
            else:
                values[name] = int(total)
        return values

    def state_dict(self) -> dict[str, list[float]]:
        """The sum of each name, and its count if it has one."""
        state = {name: [float(total)] for name, total in self._sums.items()}
        for name, count in self._counts.items():
            state[name].append(float(count))
        return state

    @staticmethod
    def from_state(state: Mapping[str, Sequence[float]]) -> Tally:
        """The inverse of `state_dict`."""
        tally = Tally()
        for name, numbers in state.items():
            tally.add(name, *numbers)
        return tally

    def to_vector(self, names: Sequence[str]) -> Tensor:
        """Everything as float64 [3 * len(names)] on the host, to be added up over ranks.

        The vector holds sums, counts, and 1 for each name that is there. The caller gives the
        names, since ranks need not have met the same ones.
        """
        left_out = self._sums.keys() - set(names)
        assert not left_out, f"the vector has no place for {sorted(left_out)}"

        numbers = [self._sums.get(name, 0.0) for name in names]
        numbers += [self._counts.get(name, 0.0) for name in names]
        numbers += [float(name in self._sums) for name in names]
        return torch.tensor(_on_host(numbers), dtype=torch.float64, device="cpu")

    @staticmethod
    def from_vector(names: Sequence[str], vector: Tensor) -> Tally:
        """The inverse of `to_vector`, usually after a sum over ranks."""
        assert vector.shape == (3 * len(names),), (
            f"{len(names)} names against a vector of {tuple(vector.shape)}"
        )
        tally = Tally()
        for name, total, count, holders in zip(names, *vector.view(3, -1).tolist(), strict=True):
            if holders:
                tally.add(name, total, count)
        return tally


def standard_errors(numbers: Mapping[str, Sequence[float] | Tensor]) -> dict[str, float]:
    """The standard error of each mean as `se/<name>`, from one number of each held-out row.

    A share is taken nearer to a half (Agresti and Coull, https://doi.org/10.2307/2685469): rows
    that are all right, or all wrong, are no proof that others are. Of other numbers, few rows tell
    too little of how they vary, so there is no error.
    """
    errors = {}
    for name, each in numbers.items():
        values = torch.as_tensor(each, dtype=torch.float64, device="cpu")
        count = len(values)
        if bool(((values == 0) | (values == 1)).all()):
            share = (float(values.sum()) + 2) / (count + 4)
            errors[f"se/{name}"] = math.sqrt(share * (1 - share) / max(1, count))
        elif count >= _FEWEST_ROWS:
            errors[f"se/{name}"] = float(values.std()) / math.sqrt(count)
    return errors


def _detached(number: Tensor | float) -> Tensor | float:
    return number.detach().double() if isinstance(number, Tensor) else float(number)


def _on_host(numbers: Sequence[Tensor | float]) -> list[float]:
    """All numbers, with one transfer for all tensors."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    moved = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(moved) if isinstance(number, Tensor) else number for number in numbers]


def quotient(total: float, count: float) -> float:
    """`total` divided by `count`; NaN where nothing was counted."""
    return total / count if count else math.nan
