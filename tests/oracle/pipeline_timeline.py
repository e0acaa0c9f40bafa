"""The schedule of a pipeline in time, if all passes take equally long; and as text."""

from __future__ import annotations

import string

from mrlhf.parallel.pipeline_order import Pass, passes


def timeline(
    stages: int, chunks: int, micro_batches: int, forward_only: bool = False
) -> list[list[Pass | None]]:
    """The pass of each rank at each time, if every pass takes one unit; None where it waits."""
    todo = [passes(rank, stages, chunks, micro_batches, forward_only) for rank in range(stages)]
    done: list[list[Pass | None]] = [[] for _ in todo]
    ends: dict[tuple[bool, int, int], int] = {}
    place = [0] * stages

    while any(place[rank] < len(todo[rank]) for rank in range(stages)):
        before = list(place)
        for rank in range(stages):
            while place[rank] < len(todo[rank]):
                each = todo[rank][place[rank]]
                number = each.chunk * stages + rank
                ready = _ready(each, number, stages * chunks, ends)
                if ready is None:
                    break
                done[rank] += [None] * (ready - len(done[rank])) + [each]
                ends[each.is_backward, number, each.micro_batch] = len(done[rank])
                place[rank] += 1
        assert place != before, "the order of the passes contradicts itself"

    length = max(map(len, done))
    return [row + [None] * (length - len(row)) for row in done]


def draw(stages: int, chunks: int, micro_batches: int) -> list[str]:
    """A line for each rank: A1 is a forward pass, a1 its backward pass; a dot: the rank waits."""
    rows = timeline(stages, chunks, micro_batches)
    return [f"stage {rank}  {' '.join(map(_cell, row))}".rstrip() for rank, row in enumerate(rows)]


def _cell(each: Pass | None) -> str:
    if each is None:
        return ". "
    letters = string.ascii_lowercase if each.is_backward else string.ascii_uppercase
    return f"{letters[each.chunk]}{each.micro_batch + 1}"


def _ready(
    each: Pass, number: int, count: int, ends: dict[tuple[bool, int, int], int]
) -> int | None:
    """The time from which a pass of virtual stage `number` can run; None: not known yet."""
    if not each.is_backward:
        return 0 if number == 0 else ends.get((False, number - 1, each.micro_batch))
    if number == count - 1:
        return ends.get((False, number, each.micro_batch))
    return ends.get((True, number + 1, each.micro_batch))
