"""Draws the schedule of each role's pipeline as text, for micro-batches of equal cost."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

from mrlhf.config.roots import AnyConfig, DPOConfig
from mrlhf.parallel.pipeline_order import Pass, timeline
from mrlhf.preflight.batches import role_work
from mrlhf.preflight.words import count

_COLUMNS = 88  # characters of the passes on a line
_STAGES = 16  # lines of a drawing


def draw_schedules(config: AnyConfig, world_size: int) -> Iterator[str]:
    """The schedule of each role that has a pipeline, line by line, for sequences of full length."""
    works = [
        work
        for work in role_work(config, world_size)
        # DPO's reference scores all pairs once, before the first step.
        if work.role.pp > 1 and not (isinstance(config, DPOConfig) and not work.is_trained)
    ]
    if not works:
        return
    yield "pipelines, time to the right, if all passes take equally long"
    yield (
        "  A1 is the forward pass of micro-batch 1 through a rank's first virtual stage, a1 its "
        "backward pass; B, b: its second one; a dot: the rank waits"
    )

    for work in works:
        virtual = f" x vpp {work.role.vpp}" if work.role.vpp > 1 else ""
        what = "forward and backward" if work.is_trained else "forward only"
        passes = f"{count(work.micro_batches, 'micro-batch')} {what}"
        yield (
            f"  {work.name}: pp {work.role.pp}{virtual}, {passes}; pipeline bubble "
            f"{work.bubble:.0%}"
        )
        forward_only = not work.is_trained
        lines = draw(work.role.pp, work.role.vpp, work.micro_batches, forward_only)
        yield from (f"    {line}" for line in lines)


def draw(stages: int, chunks: int, micro_batches: int, forward_only: bool) -> Iterator[str]:
    """The schedule of a pipeline, a line for each rank of it.

    If there are too many columns or ranks, the middle is left out, and a line says so.
    """
    rows = timeline(stages, chunks, micro_batches, forward_only)
    width = len(f"A{micro_batches}")
    columns = _ends(range(len(rows[0])), _COLUMNS // (width + 1))
    shown = _ends(range(stages), _STAGES)

    label = len(f"stage {stages - 1}")
    for rank in shown:
        if rank is None:
            yield f"{'...':<{label}}"
            continue
        cells = ["..." if time is None else _cell(rows[rank][time], width) for time in columns]
        yield f"{f'stage {rank}':<{label}}  {' '.join(cells)}".rstrip()

    left_out = []
    if None in columns:
        left_out.append(f"{len(rows[0]) - len(columns) + 1} of {len(rows[0])} passes")
    if None in shown:
        left_out.append(f"{stages - len(shown) + 1} of {stages} stages")
    if left_out:
        yield f"left out in the middle: {' and '.join(left_out)}"


def _ends(numbers: Sequence[int], most: int) -> list[int | None]:
    """All numbers, or the first and the last of them with a None between, `most` in all."""
    if len(numbers) <= most:
        return list(numbers)
    first = most // 2
    last = most - first - 1
    return [*numbers[:first], None, *numbers[len(numbers) - last :]]


def _cell(each: Pass | None, width: int) -> str:
    if each is None:
        return f"{'.':<{width}}"
    letters = string.ascii_lowercase if each.is_backward else string.ascii_uppercase
    return f"{letters[each.chunk % len(letters)]}{each.micro_batch + 1}".ljust(width)
