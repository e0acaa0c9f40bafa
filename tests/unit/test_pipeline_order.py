"""The order in which stages run their passes: megatron-core's, and what it costs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from mrlhf.parallel.pipeline_order import (
    Pass,
    bubble,
    group_size,
    idle_share,
    in_flight,
    passes,
    received,
    rounds,
)
from tests.oracle.pipeline_timeline import draw, timeline

SIZES = list(itertools.product((2, 3, 4, 8), (1, 2, 3), (1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 23)))
"""Ranks, virtual stages of each, micro-batches."""


def forward(micro_batch: int, chunk: int = 0) -> Pass:
    return Pass(False, chunk, micro_batch)


def backward(micro_batch: int, chunk: int = 0) -> Pass:
    return Pass(True, chunk, micro_batch)


def test_1f1b_of_two_ranks() -> None:
    assert passes(0, 2, 1, 3) == [
        *(forward(0), forward(1), backward(0), forward(2), backward(1), backward(2))
    ]
    assert passes(1, 2, 1, 3) == [
        *(forward(0), backward(0), forward(1), backward(1), forward(2), backward(2))
    ]
    assert passes(0, 2, 1, 2, forward_only=True) == [forward(0), forward(1)]


def test_schedules_in_time() -> None:
    assert draw(2, 1, 4) == [
        "stage 0  A1 A2 .  a1 A3 a2 A4 a3 .  a4",
        "stage 1  .  A1 a1 A2 a2 A3 a3 A4 a4 .",
    ]
    assert draw(2, 2, 2) == [
        "stage 0  A1 A2 B1 B2 .  b1 .  b2 a1 a2",
        "stage 1  .  A1 A2 B1 b1 B2 b2 a1 a2 .",
    ]


def test_interleaved_passes_of_the_last_rank() -> None:
    assert passes(1, 2, 2, 2) == [
        *(forward(0), forward(1), forward(0, 1), backward(0, 1)),
        *(forward(1, 1), backward(1, 1), backward(0), backward(1)),
    ]


def test_micro_batches_in_flight() -> None:
    """As each backward pass begins: of 1F1B as many as stages follow, and this one."""
    assert in_flight(0, 1, 1) == {(0, (1,))}
    assert in_flight(0, 4, 1) == {(0, (count,)) for count in (4, 3, 2, 1)}
    assert in_flight(3, 4, 1) == {(0, (1,))}
    assert max(sum(counts) for _, counts in in_flight(0, 2, 2)) == 2 * (2 + 1) - 1


def test_a_schedule_of_fewer_micro_batches_than_ranks_runs_empty_ones() -> None:
    assert rounds(1, stages=4, chunks=2) == 4
    assert rounds(5, stages=4, chunks=2) == 5
    assert rounds(1, stages=4, chunks=1) == 1
    assert passes(0, 2, 2, 1) == [forward(0), forward(0, 1), backward(0, 1), backward(0)]


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), SIZES)
def test_a_rank_receives_what_its_neighbours_send(
    stages: int, chunks: int, micro_batches: int
) -> None:
    count = rounds(micro_batches, stages, chunks)

    for rank in range(stages):
        is_first, is_last = rank == 0, rank == stages - 1
        before = passes((rank - 1) % stages, stages, chunks, count)
        after = passes((rank + 1) % stages, stages, chunks, count)
        # What the last virtual stage computes goes nowhere, nor do the gradients of the first.
        hidden = [
            each.micro_batch
            for each in before
            if not each.is_backward and not (is_first and each.chunk == chunks - 1)
        ]
        gradients = [
            each.micro_batch
            for each in after
            if each.is_backward and not (is_last and each.chunk == 0)
        ]
        assert received(rank, stages, chunks, count) == (hidden, gradients)


@pytest.mark.parametrize(
    ("count", "stages", "size"),
    [(4, 4, 4), (8, 4, 4), (5, 4, 5), (7, 4, 7), (9, 4, 5), (11, 4, 6), (3, 2, 3), (5, 2, 3)],
)
def test_groups_of_micro_batches(count: int, stages: int, size: int) -> None:
    assert group_size(count, stages) == size


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), SIZES)
def test_the_order_is_that_of_megatron_core(stages: int, chunks: int, micro_batches: int) -> None:
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    count = rounds(micro_batches, stages, chunks)
    size = group_size(count, stages) if chunks > 1 else count
    table = get_schedule_table(count, chunks, size)
    for rank in range(stages):
        group: Any = SimpleNamespace(size=lambda: stages, rank=lambda rank=rank: rank)
        communicator: Any = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
        )
        _, _, ahead, _ = get_pp_rank_microbatches(
            count, chunks, size, p2p_communicator=communicator
        )
        order = passes(rank, stages, chunks, micro_batches)
        forwards = [(each.micro_batch, each.chunk) for each in order if not each.is_backward]
        backwards = [
            (each.micro_batch, chunks - 1 - each.chunk) for each in order if each.is_backward
        ]
        real = [entry for entry in table if entry[0] < micro_batches]
        assert forwards == backwards == real
        if count == micro_batches:
            before = next(number for number, each in enumerate(order) if each.is_backward)
            assert before == min(ahead + 1, len(real))


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), SIZES)
@pytest.mark.parametrize("forward_only", [False, True])
def test_the_bubble_is_the_time_that_ranks_wait(
    stages: int, chunks: int, micro_batches: int, forward_only: bool
) -> None:
    rows = timeline(stages, chunks, micro_batches, forward_only)
    work = micro_batches * chunks * (1 if forward_only else 2)
    for row in rows:
        assert sum(each is not None for each in row) == work
    waiting = len(rows[0]) - work
    assert waiting / work == pytest.approx(bubble(micro_batches, stages, chunks))
    assert waiting / len(rows[0]) == pytest.approx(idle_share(micro_batches, stages, chunks))


def test_the_bubble_of_literal_sizes() -> None:
    assert bubble(8, stages=4) == 3 / 8
    assert bubble(8, stages=4, chunks=2) == 3 / 16
    assert bubble(8, stages=1) == 0
    assert bubble(1, stages=4, chunks=2) == 3  # one micro-batch: the others wait, whatever the cut
