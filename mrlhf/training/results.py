"""The results of micro-batches and of mini-batches, and the metrics of these over all ranks.

It does not know which loss is minimised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mrlhf.metrics import Tally
from mrlhf.metrics.table import names_of
from mrlhf.parallel.collectives import all_gather_ragged
from mrlhf.training.expert_routing import ExpertLoad
from mrlhf.training.optimizer import OptimizerStep


@dataclass(frozen=True)
class PackResult:
    """The result of a loss besides its scalar."""

    tally: Tally  # sums and counts over the pack
    kept: Tensor | None = None  # a tensor that the caller wants back


Loss = Callable[[Tensor, int], tuple[Tensor, PackResult]]


@dataclass(frozen=True)
class MiniBatchResult:
    """The outcome of `ModelEngine.train_mini_batch`."""

    role: str  # prefix of the names of the metrics
    tally: Tally  # this rank's part of the metrics
    kept: list[Tensor | None]  # `PackResult.kept` of each pack; empty before the last stage
    step: OptimizerStep | None  # the outcome of the optimizer step; None if `stop` prevented it
    load: ExpertLoad | None = None  # of the experts; None for a dense model
    # Metrics that some ranks' tallies may have beside those of the table; the same on every rank.
    further: Sequence[str] = ()


def merge_results(results: Sequence[MiniBatchResult], total: Tally, group: ProcessGroup) -> Tally:
    """Add the mini-batches' metrics to `total`, in order; all ranks of `group` call it."""
    if not results:
        return total
    role = results[0].role
    names = [*names_of(role), *results[0].further]
    # They are added in the order of the ranks, however many mini-batches there are, so that an
    # update that was interrupted gives the same numbers.
    parts = all_gather_ragged(
        torch.stack([result.tally.to_vector(names) for result in results]), group
    )
    numbers = functools.reduce(torch.add, parts)

    for result, vector in zip(results, numbers, strict=True):
        tally = Tally.from_vector(names, vector)
        taken = result.step is not None and result.step.taken
        skipped = result.step is not None and not result.step.taken
        if skipped:
            tally = tally.finite()

        norm = result.step.grad_norm if result.step is not None and taken else 0.0
        tally.add(f"{role}/grad_norm", norm, taken)
        tally.add(f"{role}/optimizer_steps", taken)
        tally.add(f"{role}/skipped_steps", skipped)
        if result.load is not None:
            tally.add(f"{role}/expert_load_max", result.load.largest, 1)
            tally.add(f"{role}/expert_load_entropy", result.load.entropy, 1)
        total.merge(tally)
    return total
