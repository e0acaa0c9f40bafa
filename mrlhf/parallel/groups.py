"""Process groups of roles and of the inference engine: the only file that creates any.

Megatron's own global groups (`parallel_state`) are never set up: each role carries its groups, so
that roles with different layouts share the same ranks. Knows layouts as rank lists; knows nothing
of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.parallel.layout import Axis, Coordinates, EngineLayout, ParallelLayout

Group = dist.ProcessGroup


@dataclass(frozen=True)
class RoleGroups:
    """The groups that this rank belongs to in one role.

    Attributes:
        layout: sizes of the role's axes.
        coordinates: where this rank stands on them.
        collection: the same groups under the names megatron-core gives them.
        dp_pp: ranks that differ from this one in data- and pipeline-parallel place only.
    """

    layout: ParallelLayout
    coordinates: Coordinates
    collection: ProcessGroupCollection
    dp_pp: Group

    @property
    def tp(self) -> Group:
        """Ranks that hold the other tensor-parallel shards of this stage."""
        return self.collection.tp

    @property
    def dp(self) -> Group:
        """Ranks that hold the same weights."""
        return self.collection.dp

    @property
    def pp(self) -> Group:
        """Ranks that hold the other stages, first to last."""
        return self.collection.pp

    @property
    def mp(self) -> Group:
        """Ranks that together hold one copy of the model."""
        return self.collection.mp

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.collection.intra_dist_opt

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head."""
        return self.coordinates.pp == self.layout.pp - 1


@dataclass(frozen=True)
class EngineGroups:
    """The groups that this rank belongs to as part of an inference replica.

    Attributes:
        layout: all replicas.
        replica: number of this rank's replica.
        tp_rank: this rank's place in it.
        tp: ranks of this replica.
        replicas: ranks with this `tp_rank`, one a replica, in the replicas' order of ranks.
    """

    layout: EngineLayout
    replica: int
    tp_rank: int
    tp: Group
    replicas: Group


class GroupFactory:
    """Creates process groups, each distinct set of ranks once.

    Creating a group is collective over the whole job: every rank must call the methods of its
    factory in the same order with the same layouts. Roles with equal layouts get the same groups.
    """

    def __init__(self, timeout_s: float) -> None:
        """Args:
        timeout_s: seconds after which a collective in one of the groups gives up.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        world = dist.group.WORLD
        assert world is not None
        self._world: Group = world
        self._groups: dict[tuple[int, ...], Group] = {tuple(range(self._world_size)): world}

    def role_groups(self, layout: ParallelLayout) -> RoleGroups:
        """This rank's groups in a role of `layout`, which covers the world."""
        assert layout.world_size == self._world_size, (layout, self._world_size)
        tp, dp, pp = self._along(layout, "tp"), self._along(layout, "dp"), self._along(layout, "pp")
        mp, tp_dp = self._along(layout, "tp", "pp"), self._along(layout, "tp", "dp")
        alone = self._mine([[rank] for rank in range(self._world_size)])
        pipelines = layout.groups("pp")
        # A tied output layer on the last stage sums its gradient with the first stage's embedding.
        embedding = self._mine_or_none(
            [sorted({pipeline[0], pipeline[-1]}) for pipeline in pipelines]
        )
        collection = ProcessGroupCollection(
            tp=tp, dp=dp, pp=pp, mp=mp, cp=alone, tp_cp=tp, dp_cp=dp, tp_dp_cp=tp_dp, hcp=None,
            ep=alone, expt_tp=tp, tp_ep=tp, tp_ep_pp=mp, expt_dp=dp,
            embd=embedding, pos_embd=None,
            intra_dp_cp=dp, intra_expt_dp=dp, inter_dist_opt=None,
            # Every rank of the model: with fewer, the distributed optimizer's gradient norm is
            # wrong without a word.
            intra_dist_opt=self._world,
        )  # fmt: skip
        return RoleGroups(
            layout,
            layout.coordinates(self._rank),
            collection,
            dp_pp=self._along(layout, "dp", "pp"),
        )

    def engine_groups(self, layout: EngineLayout) -> EngineGroups:
        """This rank's groups in the inference engine."""
        replica, tp_rank = layout.place(self._rank)
        across = [[ranks[place] for ranks in layout.replicas] for place in range(layout.tp)]
        return EngineGroups(
            layout, replica, tp_rank, tp=self._mine(layout.replicas), replicas=self._mine(across)
        )

    def _along(self, layout: ParallelLayout, *axes: Axis) -> Group:
        return self._mine(layout.groups(*axes))

    def _mine(self, partition: Sequence[Sequence[int]]) -> Group:
        group = self._mine_or_none(partition)
        assert group is not None, f"rank {self._rank} is in none of {partition}"
        return group

    def _mine_or_none(self, rank_lists: Sequence[Sequence[int]]) -> Group | None:
        """Create the groups of all lists; the one that this rank is in, if any."""
        mine = None
        for ranks in rank_lists:
            key = tuple(sorted(ranks))
            if key not in self._groups:
                self._groups[key] = dist.new_group(list(key), timeout=self._timeout)
            if self._rank in key:
                mine = self._groups[key]
        return mine
