"""The ranks that form each replica of the inference engine, in plain integers.

The replicas stand on the ranks of the actor, whose layout says where each rank is. Nothing here
touches a process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrlhf.errors import ConfigError
from mrlhf.parallel.layout import AXES, MODEL_AXES, Axis, AxisSizes, ParallelLayout


@dataclass(frozen=True)
class ReplicaPlace:
    """The position of a rank in its inference replica.

    The experts of a layer are shared out over `ep` ranks or groups of ranks; the `etp` ranks of a
    group, which are neighbours, split each of their experts.
    """

    tp_rank: int  # the position of the rank
    tp: int  # the ranks of the replica
    ep: int = 1  # parts of the replica that a layer's experts are shared out over; divides tp

    @property
    def etp(self) -> int:
        """The number of ranks that split an expert."""
        return self.tp // self.ep

    @property
    def etp_rank(self) -> int:
        """The position of the rank among those that split its experts."""
        return self.tp_rank % self.etp

    @property
    def ep_rank(self) -> int:
        """The part of the replica that the rank belongs to."""
        return self.tp_rank // self.etp


@dataclass(frozen=True)
class EngineLayout:
    """The ranks that form each inference replica, `tp` ranks each.

    Each group of ranks of `actor` that differ along `axes` only is cut into replicas of consecutive
    ranks, so the replicas hold each rank once.
    """

    tp: int  # tensor-parallel size of the engine
    actor: ParallelLayout  # the layout of the role whose ranks the replicas share
    axes: tuple[Axis, ...]  # the axes along which the ranks of a replica may differ
    ep: int = 1  # parts of a replica that a layer's experts are shared out over; divides tp

    @classmethod
    def inside(cls, actor: ParallelLayout, tp: int, ep: int = 1) -> EngineLayout:
        """Replicas of `tp` neighbours in model-parallel groups; ConfigError if it divides none."""
        sizes = AxisSizes(tp=actor.tp, cp=actor.cp, pp=actor.pp)
        if sizes.ranks % tp:
            raise ConfigError(
                f"rollout.tp {tp} does not divide {sizes.product('actor')}; choose a divisor of it"
            )
        return cls(tp, actor, MODEL_AXES, ep)

    @classmethod
    def consecutive(cls, actor: ParallelLayout, tp: int, ep: int = 1) -> EngineLayout:
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
        if actor.group_size("tp", "cp") % tp == 0 or actor.dp == 1:
            return cls(tp, actor, MODEL_AXES, ep)
        return cls(tp, actor, AXES, ep)

    @classmethod
    def closest(cls, actor: ParallelLayout, tp: int, ep: int = 1) -> EngineLayout:
        """Replicas inside model-parallel groups, or across those that share experts anyway.

        Raises:
            ConfigError: tp divides neither such a group nor, where experts are shared, the world.
        """
        inside_groups = cls(tp, actor, MODEL_AXES, ep)
        fits = actor.group_size(*MODEL_AXES) % tp == 0
        if fits or inside_groups.copies_together == 1:
            return cls.inside(actor, tp, ep)
        return cls.consecutive(actor, tp, ep)

    @property
    def is_inside(self) -> bool:
        """Whether each replica lies in one model-parallel group of the actor."""
        return self.axes == MODEL_AXES

    @property
    def copies_together(self) -> int:
        """How many neighbouring model-parallel groups of the actor hold all experts together."""
        dense = self.actor.group_size("tp", "cp")
        return math.lcm(dense, self.actor.group_size("etp", "ep")) // dense

    @property
    def exchanges(self) -> list[list[int]]:
        """The lists of ranks that pass weights on to each other, each rank in one of them."""
        if not self.is_inside:
            return [list(range(self.actor.world_size))]
        groups = self.actor.groups(*MODEL_AXES)
        together = self.copies_together
        return [
            sorted(rank for group in groups[first : first + together] for rank in group)
            for first in range(0, len(groups), together)
        ]

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
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

    def place_in_replica(self, rank: int) -> ReplicaPlace:
        """The position of global rank `rank` in its replica."""
        _, tp_rank = self.place(rank)
        return ReplicaPlace(tp_rank, self.tp, self.ep)

    def rank_at(self, replica: int, tp_rank: int) -> int:
        """The global rank that stands at `tp_rank` of replica number `replica`."""
        group, number = divmod(replica, self._per_group)
        return self.actor.rank_in(group, number * self.tp + tp_rank, *self.axes)

    @property
    def _per_group(self) -> int:
        return self.actor.group_size(*self.axes) // self.tp
