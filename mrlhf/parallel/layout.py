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
MODEL_AXES: tuple[Axis, ...] = ("tp", "pp")


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

    def place(self, rank: int, *axes: Axis) -> tuple[int, int]:
        """(number of the group, position in it) of global rank `rank` in `groups(*axes)`."""
        coordinates = self.coordinates(rank)
        number = 0
        position = 0
        for axis in reversed(AXES):
            if axis in axes:
                position = position * self.size(axis) + coordinates.along(axis)
            else:
                number = number * self.size(axis) + coordinates.along(axis)
        return number, position

    def rank_in(self, number: int, position: int, *axes: Axis) -> int:
        """The global rank at `position` of group `number` in `groups(*axes)`."""
        coordinates: dict[str, int] = {}
        for axis in AXES:
            if axis in axes:
                position, coordinates[axis] = divmod(position, self.size(axis))
            else:
                number, coordinates[axis] = divmod(number, self.size(axis))
        return self.rank_at(**coordinates)

    def group_size(self, *axes: Axis) -> int:
        """Number of ranks in each list of `groups(*axes)`."""
        return math.prod(self.size(axis) for axis in axes)

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The rank lists of the process groups whose ranks differ along `axes` only.

        Each list is ascending, and together the lists hold each rank once.
        """
        size = self.group_size(*axes)
        numbers = range(self.world_size // size)
        return [[self.rank_in(n, position, *axes) for position in range(size)] for n in numbers]

    def stage_layers(self, stage: int, num_layers: int) -> range:
        """Global numbers of the layers on pipeline stage `stage`; pp divides `num_layers`."""
        per_stage = num_layers // self.pp
        return range(stage * per_stage, (stage + 1) * per_stage)


@dataclass(frozen=True)
class EngineLayout:
    """Which ranks form the inference replicas, `tp` ranks each.

    Each group of ranks of `actor` that differ along `axes` only is cut into replicas of
    consecutive ranks, so the replicas hold each rank once.

    Attributes:
        tp: tensor-parallel size of the engine.
        actor: the layout of the role whose ranks the replicas share.
        axes: the axes along which the ranks of a replica may differ.
    """

    tp: int
    actor: ParallelLayout
    axes: tuple[Axis, ...]

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
        return cls(tp, actor, MODEL_AXES)

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

        # Ranks that follow each other differ along the first axis first.
        if actor.tp % tp == 0 or actor.dp == 1:
            return cls(tp, actor, MODEL_AXES)
        return cls(tp, actor, AXES)

    @property
    def is_inside(self) -> bool:
        """Whether each replica lies in one model-parallel group of the actor."""
        return self.axes == MODEL_AXES

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return self.actor.world_size // self.tp

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each replica in tensor-parallel order."""
        places = range(self.tp)
        return tuple(
            tuple(self.rank_at(number, tp_rank) for tp_rank in places)
            for number in range(self.num_replicas)
        )

    def place(self, rank: int) -> tuple[int, int]:
        """(number of the replica, tensor-parallel rank in it) of global rank `rank`."""
        group, position = self.actor.place(rank, *self.axes)
        number, tp_rank = divmod(position, self.tp)
        return group * self._per_group + number, tp_rank

    def rank_at(self, replica: int, tp_rank: int) -> int:
        """The global rank that stands at `tp_rank` of replica number `replica`."""
        group, number = divmod(replica, self._per_group)
        return self.actor.rank_in(group, number * self.tp + tp_rank, *self.axes)

    @property
    def _per_group(self) -> int:
        return self.actor.group_size(*self.axes) // self.tp
