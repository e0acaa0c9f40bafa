"""Who is who: tensor-, data- and pipeline-parallel coordinates of each rank, in plain integers.

Ranks are numbered tensor-parallel first, then data-parallel, then pipeline-parallel, as
megatron-core does. Nothing here touches a process group, so a layout for ten thousand ranks can be
asked for on a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrlhf.errors import ConfigError

Axis = Literal["tp", "dp", "pp"]


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands on each axis."""

    tp: int
    dp: int
    pp: int


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
                f"{role}: tp {tp} x pp {pp} = {tp * pp} does not divide the world size {world_size}; "
                f"start a multiple of {tp * pp} processes or lower {role}.tp or {role}.pp"
            )
        return cls(tp=tp, pp=pp, dp=world_size // (tp * pp))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of global rank `rank`."""
        return Coordinates(
            tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp)
        )

    def rank_at(self, tp: int, dp: int, pp: int) -> int:
        """The global rank with these coordinates."""
        return tp + self.tp * (dp + self.dp * pp)

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The rank lists that differ along `axes` only, each ascending; together they cover the
        world once.
        """
        by_rest: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            rest = tuple(getattr(at, axis) for axis in ("tp", "dp", "pp") if axis not in axes)
            by_rest.setdefault(rest, []).append(rank)
        return list(by_rest.values())

    def stage_layers(self, stage: int, num_layers: int) -> range:
        """Global numbers of the layers on pipeline stage `stage`; `num_layers` is divisible by pp."""
        per_stage = num_layers // self.pp
        return range(stage * per_stage, (stage + 1) * per_stage)


@dataclass(frozen=True)
class EngineLayout:
    """Inference replicas: groups of `tp` ranks.

    Attributes:
        tp: tensor-parallel size of the engine.
        replicas: global ranks of each replica in tensor-parallel order; together they cover the
            world once.
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
                f"rollout.tp {tp} does not divide actor.tp {actor.tp} x actor.pp {actor.pp} = {actor.tp * actor.pp}; "
                f"choose a divisor of it"
            )
        replicas = [
            group[i : i + tp]
            for group in actor.groups("tp", "pp")
            for i in range(0, len(group), tp)
        ]
        return cls(tp=tp, replicas=tuple(tuple(replica) for replica in replicas))

    @classmethod
    def consecutive(cls, actor: ParallelLayout, tp: int) -> EngineLayout:
        """Cut the ranks of the job into replicas of `tp` consecutive ones, whatever the actor's
        groups are.

        Raises:
            ConfigError: tp does not divide the world size.
        """
        if actor.world_size % tp:
            raise ConfigError(
                f"rollout.tp {tp} does not divide the world size {actor.world_size}; choose a divisor of it"
            )
        ranks = range(actor.world_size)
        return cls(
            tp=tp, replicas=tuple(tuple(ranks[i : i + tp]) for i in range(0, actor.world_size, tp))
        )

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
