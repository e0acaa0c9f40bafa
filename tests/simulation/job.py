"""Simulates those ranks of a job that differ, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from math import prod

from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.errors import ConfigError, TrainingError
from mrlhf.models.parameters import role_pieces
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.batches import trained_models
from mrlhf.preflight.checks import check
from mrlhf.preflight.footprint import Specs
from tests.simulation.rank import Simulated, simulate_rank


def simulate(
    config: AnyConfig, specs: Specs, world_size: int, per_machine: int
) -> Iterator[Simulated]:
    """Simulate the start and one step of each rank of `distinct_ranks`.

    Args:
        specs: the model of each role.
        per_machine: ranks of a machine.

    Raises:
        ConfigError: the configuration does not fit so many ranks, or cannot be simulated.
        TrainingError: a process was killed.
    """
    check(config, world_size)
    if isinstance(config, PPOConfig) and config.rollout.engine != "native":
        raise ConfigError(
            f"rollout.engine {config.rollout.engine} needs GPUs to start; give "
            "rollout.engine=native to simulate the rest of the run"
        )
    ranks = distinct_ranks(config, specs, world_size)
    alone = partial(simulate_alone, config, world_size, per_machine)
    with ThreadPoolExecutor(min(len(ranks), os.cpu_count() or 1)) as at_once:
        yield from at_once.map(alone, ranks)


def simulate_alone(config: AnyConfig, world_size: int, per_machine: int, rank: int) -> Simulated:
    """Simulate one rank in a process of its own, which cannot leave one world for another."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(simulate_rank, config, world_size, rank, per_machine).result()
        except BrokenProcessPool as error:
            raise TrainingError(
                f"the process that simulated rank {rank} was killed; has this machine too "
                "little memory?"
            ) from error


def distinct_ranks(config: AnyConfig, specs: Specs, world_size: int) -> list[int]:
    """The first rank of each kind: ranks differ if their stages of a model do.

    Two stages are alike if both or neither begin the model, the same of its end, and their weights
    have as many elements.
    """
    layouts = []
    stages = []
    trained = trained_models(config)
    for name, role in config.roles().items():
        if name not in trained and not isinstance(config, PPOConfig):
            continue  # DPO's reference is not simulated
        layout = ParallelLayout.for_world(name, world_size, AxisSizes.of(role))
        layouts.append(layout)
        kinds = []
        for stage in range(layout.pp):
            pieces = role_pieces(specs[name], layout, layout.rank_at(pp=stage))
            elements = sum(prod(piece.shape(piece.start, piece.stop)) for piece in pieces)
            kinds.append((stage == 0, stage == layout.pp - 1, elements))
        stages.append(kinds)

    firsts: dict[tuple[object, ...], int] = {}
    for rank in range(world_size):
        places = (layout.coordinates(rank).pp for layout in layouts)
        kind = tuple(kinds[stage] for kinds, stage in zip(stages, places, strict=True))
        firsts.setdefault(kind, rank)
    return list(firsts.values())
