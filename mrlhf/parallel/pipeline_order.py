"""The order in which the stages of a pipeline run their passes, and the time that they stand idle.

The order is that of megatron-core's schedules: 1F1B, or interleaved 1F1B where the ranks have
several virtual stages (https://arxiv.org/abs/2104.04473, section 2.2). This file is arithmetic on
ints. It runs nothing, and knows no layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple


class Pass(NamedTuple):
    """A stage's work on one micro-batch; all are numbered from 0."""

    is_backward: bool
    chunk: int  # the virtual stage of the rank
    micro_batch: int


def rounds(micro_batches: int, stages: int, chunks: int) -> int:
    """The micro-batches that the schedule runs; interleaved, at least as many as ranks."""
    return micro_batches if chunks == 1 else max(micro_batches, stages)


def group_size(rounds: int, stages: int) -> int:
    """The number of micro-batches that go through a chunk before a rank turns to its next chunk."""
    assert rounds >= stages, (rounds, stages)
    # The smallest with which no stage waits: the last group, which has the rest, also holds at
    # least as many micro-batches as there are ranks.
    sizes = range(stages, rounds + 1)
    return next(size for size in sizes if rounds % size == 0 or rounds % size >= stages)


def bubble(micro_batches: float, stages: int, chunks: int = 1) -> float:
    """Time for which a rank stands idle, as a share of the time in which it computes."""
    # (p - 1) / (m v), with p ranks of v virtual stages and m micro-batches that cost the same.
    # Micro-batches that are fewer than ranks also wait at every turn of the pipeline.
    missing = max(0.0, stages - micro_batches)
    return (stages - 1 + (chunks - 1) * missing) / (micro_batches * chunks)


def idle_share(micro_batches: float, stages: int, chunks: int = 1) -> float:
    """The bubble as a share of the whole step, idle time included; the arguments are `bubble`'s."""
    lost = bubble(micro_batches, stages, chunks)
    return lost / (1 + lost)


def passes(
    rank: int, stages: int, chunks: int, micro_batches: int, forward_only: bool = False
) -> list[Pass]:
    """The passes of a rank of the pipeline, in order; empty micro-batches are left out."""
    order = _forward_order(micro_batches, stages, chunks)
    forward = [Pass(False, chunk, number) for chunk, number in order]
    backward = [Pass(True, chunks - 1 - chunk, number) for chunk, number in order]

    if forward_only:
        ordered: Sequence[Pass | None] = forward
    else:
        ahead = _warm_up(rank, stages, chunks, micro_batches)
        in_turn = zip_longest(forward[ahead:], backward)
        ordered = [*forward[:ahead], *(each for pair in in_turn for each in pair)]
    return [each for each in ordered if each is not None and each.micro_batch < micro_batches]


@lru_cache(maxsize=1024)
def in_flight(rank: int, stages: int, chunks: int) -> frozenset[tuple[int, tuple[int, ...]]]:
    """The micro-batches that a rank of a full pipeline has run forward and not yet backward.

    Returns:
        For each backward pass its chunk, and the micro-batches by chunk as it begins.
    """
    counts = [0] * chunks
    found = set()
    for each in passes(rank, stages, chunks, 2 * stages):
        if each.is_backward:
            found.add((each.chunk, tuple(counts)))
        counts[each.chunk] += -1 if each.is_backward else 1
    return frozenset(found)


def received(
    rank: int, stages: int, chunks: int, micro_batches: int
) -> tuple[list[int], list[int]]:
    """The micro-batches whose hidden states and whose gradients a rank receives, in their order."""
    order = _forward_order(micro_batches, stages, chunks)
    hidden = [number for chunk, number in order if rank > 0 or chunk > 0]
    # Gradients go through the chunks from the last to the first, which the order counts from 0 too.
    gradients = [number for chunk, number in order if rank < stages - 1 or chunk > 0]
    return hidden, gradients


def _forward_order(micro_batches: int, stages: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of all forward passes of a rank, empty micro-batches included."""
    count = rounds(micro_batches, stages, chunks)
    if chunks == 1:
        return [(0, number) for number in range(count)]

    size = group_size(count, stages)
    order = []
    for begin in range(0, count, size):
        group = range(begin, min(begin + size, count))
        order += [(chunk, number) for chunk in range(chunks) for number in group]
    return order


def _warm_up(rank: int, stages: int, chunks: int, micro_batches: int) -> int:
    """The number of forward passes before a rank's forward and backward passes take turns."""
    count = rounds(micro_batches, stages, chunks)
    after = stages - rank - 1
    if chunks == 1:
        return min(after, count)
    return min(2 * after + (chunks - 1) * group_size(count, stages), count * chunks)
