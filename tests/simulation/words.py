"""What simulated ranks have done, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.parallel.device_memory import START
from mrlhf.preflight.footprint import GENERATION, Footprint, update_of
from tests.simulation.rank import Simulated

_MOST_EXCHANGES = 12
_WHOLE = "step"  # the phase around those of a step of PPO


def problems(ranks: Sequence[Simulated], room: int) -> Iterator[str]:
    """What is wrong with each rank: an error, or a phase in which it holds more than `room`."""
    for one in ranks:
        if one.error:
            yield f"rank {one.rank} failed in phase {one.failed_in}: {one.error}"
            continue
        # Of equal phases the last one: what is built at the start stays.
        phase = max(reversed(list(one.held)), key=lambda name: sum(one.held[name].values()))
        held = one.held[phase]
        lacking = sum(held.values()) - room
        if lacking > 0:
            owners = sorted(held.items(), key=lambda item: -item[1])[:3]
            yield (
                f"rank {one.rank} lacks {lacking / 1e9:.1f} GB in phase {phase}, which holds "
                + ", ".join(f"{owner} {nbytes / 1e9:.1f}" for owner, nbytes in owners)
            )


def memory_table(config: AnyConfig, ranks: Sequence[Simulated], plan: Footprint) -> Iterator[str]:
    """What each rank holds in each phase, and what the plan says of the rank that has most."""
    yield "held in each phase, GB, without activations:"
    known = _planned_phases(config)
    rows = [["", *(f"rank {one.rank}" for one in ranks), "planned"]]
    phases = dict.fromkeys(phase for one in ranks for phase in one.held)
    for phase in phases:
        if phase == START or (phase == _WHOLE and isinstance(config, PPOConfig)):
            continue
        held = [sum(one.held.get(phase, {}).values()) / 1e9 for one in ranks]
        planned = known.get(phase)
        told = "" if planned is None else f"{plan.owned(planned) / 1e9:.3f}"
        rows.append([phase, *(f"{each:.3f}" for each in held), told])
    yield from _aligned(rows)


def exchange_table(one: Simulated) -> Iterator[str]:
    """What a rank exchanges most of."""
    yield f"exchanged by rank {one.rank}, with one mini-batch of the fewest samples:"
    rows = [["phase", "collective", "among", "calls", "GB"]]
    largest = sorted(one.nbytes.items(), key=lambda item: -item[1])[:_MOST_EXCHANGES]
    for kind, nbytes in largest:
        calls = one.calls[kind]
        row = [kind.phase, kind.operation, str(kind.ranks), str(calls), f"{nbytes / 1e9:.3f}"]
        rows.append(row)
    yield from _aligned(rows, left=2)


def _planned_phases(config: AnyConfig) -> dict[str, str]:
    """The phases of a run that a plan knows, and their names there."""
    if not isinstance(config, PPOConfig):
        return {_WHOLE: update_of("model")}
    known = {f"update_{name}": update_of(name) for name in config.trained()}
    return {"gen": GENERATION, **known}


def _aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Rows in columns, of which the first `left` begin at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
