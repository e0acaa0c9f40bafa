"""Cuts a batch of sequences into mini-batches, data-parallel shares and micro-batches.

Everything is a pure function of lengths, so every rank knows every other rank's share without
asking. A batch is cut once a step, and the cut goes wherever the batch goes: the same sequences
stand in the same pack in every forward pass and in every epoch. So log-probabilities before the
update and during its first mini-batch are equal bit for bit. This file knows neither models nor
process groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mrlhf.parallel import pipeline_order
from mrlhf.parallel.balance import pack_rows, split_balanced
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.prefixes import SharedPrompts, united


@dataclass(frozen=True)
class MiniBatch:
    """The sequences of one optimizer step and the ranks that compute them."""

    rows: list[int]  # the rows of the batch that they are; ascending, without gaps
    micro_batches: list[list[list[int]]]  # sequences packed together, by [dp rank][micro-batch]
    loads: list[int]  # the work of each dp rank
    tokens: int = 0  # of all micro-batches
    saved: int = 0  # tokens that need not be there, since rows share them
    spared: int = 0  # the work for them


@dataclass(frozen=True)
class Balance:
    """How evenly a cut shares out the work."""

    # The cost of the costliest rank over the mean of all data-parallel ranks. With several
    # mini-batches it is the sum of the one over the sum of the other, since the ranks wait for each
    # other at the end of each.
    imbalance: float
    micro_batches: float  # of a data-parallel rank in a mini-batch; the mean
    # With prompts that are computed once: the share of all tokens that is not computed again.
    shared: float | None = None
    work: float = 1.0  # what is computed, over what would be if rows shared nothing

    def metrics(self, role: str, layout: ParallelLayout) -> dict[str, float]:
        """`train/imbalance/<role>`, and with several pipeline stages `train/bubble/<role>`.

        With prompts that are computed once, also `perf/shared_tokens/<role>`.
        """
        metrics = {f"train/imbalance/{role}": self.imbalance}
        if self.shared is not None:
            metrics[f"perf/shared_tokens/{role}"] = self.shared
        if layout.pp > 1:
            bubble = pipeline_order.bubble(self.micro_batches, layout.pp, layout.vpp)
            metrics[f"train/bubble/{role}"] = bubble
        return metrics


@dataclass(frozen=True)
class PackedMiniBatch:
    """One mini-batch as one data-parallel rank computes it."""

    rows: list[int]  # over all ranks; ascending, without gaps
    packs: list[Pack]  # this rank's micro-batches; `Pack.rows` are rows of the whole batch

    @property
    def local_packs(self) -> list[Pack]:
        """The packs with their rows, and so their places, counted from the mini-batch's first."""
        first = self.rows[0]
        return [replace(pack, rows=[row - first for row in pack.rows]) for pack in self.packs]


@dataclass(frozen=True)
class BatchCut:
    """A batch as one data-parallel rank computes it, mini-batch by mini-batch."""

    mini_batches: list[PackedMiniBatch]  # this rank's part of each
    balance: Balance  # how evenly the work is shared out over all ranks

    @property
    def packs(self) -> list[Pack]:
        """This rank's micro-batches of all mini-batches, in order."""
        return [pack for mini_batch in self.mini_batches for pack in mini_batch.packs]


def balance_of(mini_batches: Sequence[MiniBatch], shares_prompts: bool = False) -> Balance:
    """How evenly a cut shares out the work, and what it saves if rows share their prompts."""
    largest = sum(max(mini_batch.loads) * len(mini_batch.loads) for mini_batch in mini_batches)
    total = sum(sum(mini_batch.loads) for mini_batch in mini_batches)
    packs = sum(len(share) for mini_batch in mini_batches for share in mini_batch.micro_batches)
    ranks = sum(len(mini_batch.loads) for mini_batch in mini_batches)
    balance = Balance(imbalance=largest / total, micro_batches=packs / ranks)
    if not shares_prompts:
        return balance
    saved = sum(mini_batch.saved for mini_batch in mini_batches)
    spared = sum(mini_batch.spared for mini_batch in mini_batches)
    tokens = sum(mini_batch.tokens for mini_batch in mini_batches)
    return replace(balance, shared=saved / (saved + tokens), work=total / (total + spared))


def cut_mini_batches(
    lengths: Sequence[int],
    costs: Sequence[int],
    mini_batch_rows: int,
    dp: int,
    budget: int,
    together: int | Sequence[int] = 1,
    in_step: bool = False,
    shared: SharedPrompts | None = None,
    row_of: Sequence[int] | None = None,
) -> list[MiniBatch]:
    """Cut sequences, in order, into mini-batches of whole rows and share each out over `dp` ranks.

    Which rows share an optimizer step depends on the batch alone, not on costs, `dp` or `budget`.
    If there are fewer rows than ranks, the last ranks get none; such a mini-batch can be evaluated,
    but not trained on.

    Args:
        lengths: tokens of each sequence, which take memory.
        costs: the work for each sequence, which takes time; in any unit.
        mini_batch_rows: the last mini-batch may be smaller.
        budget: most tokens of a micro-batch.
        together: number of consecutive rows that must stay in one micro-batch, such as 2 for the
            two sides of a preference pair; or one number for each unit of a single mini-batch.
        in_step: whether all ranks need the same number of micro-batches, since tokens travel
            between them. Those that lack some then have empty ones at the end of a mini-batch.
        shared: prompts that a micro-batch holds once; rows that share one stay together where
            there is room, and as long as every rank gets some.
        row_of: the row of each sequence, ascending; None: each is a row.
    """
    if row_of is None:
        row_of = range(len(lengths))
    mini_batches = []

    for begin in range(0, row_of[-1] + 1, mini_batch_rows):
        end = min(begin + mini_batch_rows, row_of[-1] + 1)
        rows = list(range(bisect_left(row_of, begin), bisect_left(row_of, end)))
        units = _units(rows, together)
        if shared is None:
            unit_lengths = [sum(lengths[row] for row in unit) for unit in units]
            unit_costs = [sum(costs[row] for row in unit) for unit in units]
            saved = spared = 0
        else:
            units = united(units, shared, budget, dp)
            unit_lengths = [shared.tokens(unit, lengths) for unit in units]
            unit_costs = [shared.cost(unit, costs) for unit in units]
            saved = sum(shared.saved(unit) for unit in units)
            spared = sum(costs[row] for row in rows) - sum(unit_costs)
        parts = min(dp, len(units))

        loads = [0] * dp
        micro_batches: list[list[list[int]]] = [[] for _ in range(dp)]
        for rank, share in enumerate(split_balanced(unit_costs, parts)):
            loads[rank] = sum(unit_costs[i] for i in share)
            lengths_here = [unit_lengths[i] for i in share]
            costs_here = [unit_costs[i] for i in share]
            for pack in pack_rows(lengths_here, costs_here, budget):
                packed_units = [units[share[i]] for i in pack]
                micro_batches[rank].append([row for unit in packed_units for row in unit])
        if in_step:
            most = max(map(len, micro_batches))
            for share_of_rank in micro_batches:
                share_of_rank += [[] for _ in range(most - len(share_of_rank))]
        tokens = sum(unit_lengths)
        of_step = list(range(begin, end))
        mini_batches.append(MiniBatch(of_step, micro_batches, loads, tokens, saved, spared))
    return mini_batches


def _units(rows: list[int], together: int | Sequence[int]) -> list[list[int]]:
    """The rows of a mini-batch in units of so many."""
    sizes = [together] * (len(rows) // together) if isinstance(together, int) else together
    assert sum(sizes) == len(rows), (len(rows), together)
    return [rows[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
