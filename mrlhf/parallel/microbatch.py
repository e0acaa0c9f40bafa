"""Cuts a batch of sequences into mini-batches, data-parallel shares and micro-batches.

Everything is a pure function of lengths, so every rank knows every other rank's share without
asking. A batch is cut once a step, and the cut goes wherever the batch goes: the same sequences
stand in the same pack in every forward pass and in every epoch. This is why log-probabilities
before the update and during its first mini-batch are equal bit for bit. This file knows neither
models nor process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mrlhf.parallel.packs import Pack


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step and the ranks that compute them.

    Attributes:
        rows: the rows of the mini-batch over all ranks; ascending, without gaps.
        micro_batches: the rows that are packed together, indexed [dp rank][micro-batch].
    """

    rows: list[int]
    micro_batches: list[list[list[int]]]


@dataclass(frozen=True)
class PackedMiniBatch:
    """One mini-batch as one data-parallel rank computes it.

    Attributes:
        rows: the rows of the mini-batch over all ranks; ascending, without gaps.
        packs: this rank's micro-batches; `Pack.rows` are rows of the whole batch.
    """

    rows: list[int]
    packs: list[Pack]

    @property
    def local_packs(self) -> list[Pack]:
        """The packs with their rows and places counted from the first row of the mini-batch."""
        first = self.rows[0]
        return [
            replace(
                pack,
                rows=[row - first for row in pack.rows],
                places=pack.places - first * pack.width,
            )
            for pack in self.packs
        ]


@dataclass(frozen=True)
class BatchCut:
    """A batch as one data-parallel rank computes it, mini-batch by mini-batch."""

    mini_batches: list[PackedMiniBatch]

    @property
    def packs(self) -> list[Pack]:
        """This rank's micro-batches of all mini-batches, in order."""
        return [pack for mini_batch in self.mini_batches for pack in mini_batch.packs]


def split_balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` parts of nearly equal total length, none empty, each
    ascending.

    Longest first, each to the part with the least so far. There must be at least as many lengths as
    parts.
    """
    assert len(lengths) >= parts, f"{len(lengths)} sequences cannot fill {parts} parts"
    loads = [(0, 0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]

    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, part = min(loads)
        shares[part].append(index)
        loads[part] = (load + lengths[index], count + 1, part)
    return [sorted(share) for share in shares]


def pack_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in as few packs of at most `budget` tokens as first-fit-decreasing
    finds.

    A sequence longer than the budget has a pack of its own.
    """
    packs: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (number for number, load in enumerate(loads) if load + lengths[index] <= budget)
        chosen = next(fits, None)
        if chosen is None:
            packs.append([index])
            loads.append(lengths[index])
        else:
            packs[chosen].append(index)
            loads[chosen] += lengths[index]
    return sorted(sorted(pack) for pack in packs)


def cut_mini_batches(
    lengths: Sequence[int], mini_batch_rows: int, dp: int, budget: int, together: int = 1
) -> list[MiniBatch]:
    """Cut rows 0..len(lengths)-1, in order, into mini-batches and share each out over `dp` ranks.

    Which rows share an optimizer step depends on the batch alone, not on `dp` or `budget`. If there
    are fewer rows than ranks, the last ranks get none; such a mini-batch can be evaluated, but not
    trained on.

    Args:
        lengths: tokens of each sequence.
        mini_batch_rows: rows of a mini-batch; the last mini-batch may be smaller.
        dp: data-parallel ranks.
        budget: most tokens of a micro-batch.
        together: number of consecutive rows that must stay in one micro-batch, such as 2 for the
            two sides of a preference pair.
    """
    assert len(lengths) % together == 0, (len(lengths), together)
    assert mini_batch_rows % together == 0, (mini_batch_rows, together)
    mini_batches = []

    for begin in range(0, len(lengths), mini_batch_rows):
        rows = list(range(begin, min(begin + mini_batch_rows, len(lengths))))
        units = [rows[i : i + together] for i in range(0, len(rows), together)]
        unit_lengths = [sum(lengths[row] for row in unit) for unit in units]
        parts = min(dp, len(units))

        micro_batches: list[list[list[int]]] = [[] for _ in range(dp)]
        for rank, share in enumerate(split_balanced(unit_lengths, parts)):
            for pack in pack_rows([unit_lengths[i] for i in share], budget):
                packed_units = [units[share[i]] for i in pack]
                micro_batches[rank].append([row for unit in packed_units for row in unit])
        mini_batches.append(MiniBatch(rows, micro_batches))
    return mini_batches
