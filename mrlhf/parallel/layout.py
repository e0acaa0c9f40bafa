"""Where each rank stands on the parallel axes of a role, in plain integers.

Ranks are numbered along the axes in the order of `AXES`, the first one fastest, as in
megatron-core. Nothing here touches a process group, so a laptop can compute a layout for ten
thousand ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mrlhf.errors import ConfigError

Axis = Literal["tp", "dp", "pp"]
AXES: tuple[Axis, ...] = ("tp", "dp", "pp")


@dataclass(frozen=True)
class Coordinates:
    """The position of one rank on each axis."""

    tp: int
    dp: int
    pp: int

    def along(self, axis: Axis) -> int:
        """The position on `axis`."""
        position: int = getattr(self, axis)
        return position


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes of one role; their product is the world size."""

    tp: int
    pp: int
    dp: int

    @classmethod
    def for_world(cls, role: str, world_size: int, tp: int, pp: int) -> ParallelLayout:
        """The layout of `role` on `world_size` ranks; data parallelism takes what tp x pp leaves.

        Raises:
            ConfigError: tp x pp does not divide the world size.
        """
        if world_size % (tp * pp):
            raise ConfigError(
                f"{role}: tp {tp} x pp {pp} = {tp * pp} does not divide the world size "
                f"{world_size}; start a multiple of {tp * pp} processes or lower {role}.tp or "
                f"{role}.pp"
            )
        return cls(tp=tp, pp=pp, dp=world_size // (tp * pp))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.size(axis) for axis in AXES)

    def size(self, axis: Axis) -> int:
        """Number of positions on `axis`."""
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of global rank `rank`."""
        positions: dict[str, int] = {}
        for axis in AXES:
            rank, positions[axis] = divmod(rank, self.size(axis))
        return Coordinates(**positions)

    def rank_at(self, tp: int, dp: int, pp: int) -> int:
        """The global rank with these coordinates."""
        coordinates = Coordinates(tp, dp, pp)
        rank = 0
        for axis in reversed(AXES):
            rank = rank * self.size(axis) + coordinates.along(axis)
        return rank

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The rank lists of the process groups whose ranks differ along `axes` only.

        Each list is ascending, and together the lists hold each rank once.
        """
        fixed_axes = [axis for axis in AXES if axis not in axes]
        ranks_at: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            fixed = tuple(coordinates.along(axis) for axis in fixed_axes)
            ranks_at.setdefault(fixed, []).append(rank)
        return list(ranks_at.values())

    def stage_layers(self, stage: int, num_layers: int) -> range:
        """Global numbers of the layers on pipeline stage `stage`; pp divides `num_layers`."""
        per_stage = num_layers // self.pp
        return range(stage * per_stage, (stage + 1) * per_stage)


@dataclass(frozen=True)
class EngineLayout:
    """Which ranks form the inference replicas, `tp` ranks each.

    Attributes:
        tp: tensor-parallel size of the engine.
        replicas: the global ranks of each replica in tensor-parallel order; together the replicas
            hold each rank once.
    """

    tp: int
    replicas: tuple[tuple[int, ...], ...]

    @classmethod
    def inside(cls, actor: ParallelLayout, tp: int) -> EngineLayout:
        """Cut each model-parallel group of `actor` into replicas of `tp` consecutive ranks.

        Raises:
            ConfigError: tp does not divide the actor's tp x pp.
        """
        if (actor.tp * actor.pp) % tp:
            raise ConfigError(
                f"rollout.tp {tp} does not divide actor.tp {actor.tp} x actor.pp {actor.pp} = "
                f"{actor.tp * actor.pp}; choose a divisor of it"
            )

        replicas: list[tuple[int, ...]] = []
        for group in actor.groups("tp", "pp"):
            for first in range(0, len(group), tp):
                replicas.append(tuple(group[first : first + tp]))
        return cls(tp=tp, replicas=tuple(replicas))

    @classmethod
    def consecutive(cls, actor: ParallelLayout, tp: int) -> EngineLayout:
        """Cut the ranks of the job into replicas of `tp` consecutive ones, across actor groups.

        Raises:
            ConfigError: tp does not divide the world size.
        """
        world_size = actor.world_size
        if world_size % tp:
            raise ConfigError(
                f"rollout.tp {tp} does not divide the world size {world_size}; choose a divisor "
                "of it"
            )

        replicas = [tuple(range(first, first + tp)) for first in range(0, world_size, tp)]
        return cls(tp=tp, replicas=tuple(replicas))

    def is_inside(self, actor: ParallelLayout) -> bool:
        """Whether each replica lies in one model-parallel group of `actor`."""
        groups = [set(group) for group in actor.groups("tp", "pp")]
        return all(any(group.issuperset(replica) for group in groups) for replica in self.replicas)

    def place(self, rank: int) -> tuple[int, int]:
        """(number of the replica, tensor-parallel rank in it) of global rank `rank`."""
        for number, replica in enumerate(self.replicas):
            if rank in replica:
                return number, replica.index(rank)
        raise AssertionError(f"rank {rank} is in no replica")
