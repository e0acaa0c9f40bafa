"""Draws the schedule of each role's pipeline as text.

It knows micro-batches by their numbers alone: the drawing is that of micro-batches of equal cost.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterator, Sequence

from mrlhf.config.roots import AnyConfig, DPOConfig, PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.parallel.layout import AxisSizes
from mrlhf.parallel.pipeline_order import Pass, idle_share, timeline
from mrlhf.preflight.checks import longest_unit

_COLUMNS = 88  # characters of the passes on a line
_STAGES = 16  # lines of a drawing


def draw_schedules(config: AnyConfig, world_size: int) -> Iterator[str]:
    """The schedule of each role that has a pipeline, line by line; of equal, longest sequences.

    Args:
        config: passes `check` for `world_size`.
        world_size: ranks.
    """
    every = config.roles()
    if isinstance(config, DPOConfig):
        every.pop("reference")  # is asked once, about all pairs
    roles = {name: role for name, role in every.items() if role.pp > 1}
    if not roles:
        return
    yield "pipelines, time to the right, if all passes take equally long"
    yield (
        "  A1 is the forward pass of micro-batch 1 through a rank's first virtual stage, a1 its "
        "backward pass; B, b: its second one; a dot: the rank waits"
    )

    trained: Collection[str] = ("model",)
    if isinstance(config, PPOConfig):
        trained = config.trained()
    for name, role in roles.items():
        count = _micro_batches_of(name, role, config, world_size)
        virtual = f" x vpp {role.vpp}" if role.vpp > 1 else ""
        what = "forward and backward" if name in trained else "forward only"
        noun = "micro-batch" if count == 1 else "micro-batches"
        share = f"{idle_share(count, role.pp, role.vpp):.0%}"
        yield f"  {name}: pp {role.pp}{virtual}, {count} {noun} {what}; pipeline bubble {share}"
        yield from (f"    {line}" for line in draw(role.pp, role.vpp, count, name not in trained))


def micro_batches(role: RoleSection, units: int, longest: int) -> int:
    """The micro-batches that `units` sequences or pairs of `longest` tokens make on one rank."""
    each = role.micro_batch_tokens // longest
    return -(-units // each)


def draw(stages: int, chunks: int, micro_batches: int, forward_only: bool) -> Iterator[str]:
    """The schedule of a pipeline, a line for each rank of it.

    What is too long, or too many ranks, is cut in the middle, and a line says so.
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


def _micro_batches_of(name: str, role: RoleSection, config: AnyConfig, world_size: int) -> int:
    """Micro-batches of a data-parallel rank in a mini-batch, or in the pass of a frozen model."""
    if isinstance(config, PPOConfig):
        prompts = config.data.train_batch_size
        if name == "reward_model":  # scores all responses, not only those that are trained on
            prompts = config.data.gen_batch_size
        elif name in config.trained():
            prompts = config.trained()[name].ppo_mini_batch_size
        samples = prompts * config.rollout.n
    else:
        samples = config.data.batch_size
    share = -(-samples // AxisSizes.of(role).dp(world_size))
    return micro_batches(role, share, longest_unit(config, role.cp))


def _ends(numbers: Sequence[int], most: int) -> list[int | None]:
    """The numbers, or both ends of them with a None between, `most` in all."""
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
