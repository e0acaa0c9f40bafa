"""Creates the process groups of roles and of the inference engine; no other file creates any.

Megatron's own global groups (`parallel_state`) are never set up. Each role carries its own groups,
so that roles with different layouts can share the same ranks. This file knows layouts as rank
lists; it does not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import Axis, Coordinates, ParallelLayout
from mrlhf.parallel.machine import Machine, name_of_this_machine
from mrlhf.parallel.segments import Segments

Group = dist.ProcessGroup


@dataclass(frozen=True)
class RoleGroups:
    """The groups that this rank belongs to in one role."""

    layout: ParallelLayout  # sizes of the role's axes
    coordinates: Coordinates  # the position of this rank on the axes
    collection: ProcessGroupCollection  # the same groups under megatron-core's names
    # Ranks with the tensor-parallel position of this one, over which the results of a batch are
    # shared out.
    results: Group
    first_copy: Group | None  # ranks that hold the first copy of the model; None on others
    machine: Machine  # the ranks of this machine, which share memory

    @property
    def tp(self) -> Group:
        """Ranks that hold the tensor-parallel shards of this stage."""
        return self.collection.tp

    @property
    def dp(self) -> Group:
        """Ranks that hold the same weights."""
        return self.collection.dp

    @property
    def pp(self) -> Group:
        """Ranks that hold the pipeline stages, first to last."""
        return self.collection.pp

    @property
    def cp(self) -> Group:
        """Ranks that hold the parts of each sequence."""
        return self.collection.cp

    @property
    def segments(self) -> Segments:
        """The segments of each sequence that this rank holds."""
        return Segments(self.coordinates.cp, self.layout.cp)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is of the pipeline stage that gives the model's output."""
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.collection.intra_dist_opt


@dataclass(frozen=True)
class EngineGroups:
    """The groups that this rank belongs to as part of an inference replica."""

    layout: EngineLayout  # all replicas
    replica: int  # number of this rank's replica
    tp_rank: int  # the position of this rank in its replica
    tp: Group  # ranks of this replica
    replicas: Group  # ranks with this `tp_rank`, one of each replica, ascending
    exchange: Group  # ranks that pass weights on to each other, and so fill the replicas they form
    machine: Machine  # the ranks of this machine, which share memory
    machines: Sequence[str]  # the name of the machine of each rank of the job


class GroupFactory:
    """Creates process groups, one for each distinct set of ranks.

    All ranks of the job take part in creating a group, so every rank must call the methods of its
    factory in the same order and with the same layouts. Roles with equal layouts get the same
    groups. `machine` are the ranks of this machine, which share memory.
    """

    def __init__(self, timeout_s: float, machines: Sequence[str] | None = None) -> None:
        """Make the group of all ranks, and those of the ranks of each machine.

        `timeout_s` are the seconds after which a collective gives up. `machines` has the name of
        each rank's machine; None: every rank finds its own, and tells the others.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        world = dist.group.WORLD
        assert world is not None
        self._world: Group = world
        self._groups: dict[tuple[int, ...], Group] = {tuple(range(self._world_size)): world}
        self._machines = machines or all_gather_objects(name_of_this_machine(), world)
        self.machine = self._machine()

    def role_groups(self, layout: ParallelLayout) -> RoleGroups:
        """This rank's groups in a role of `layout`, which covers the world."""
        assert layout.world_size == self._world_size, (layout, self._world_size)
        dp_cp = self._along(layout, "cp", "dp")
        expert_dp = self._along(layout, "edp")

        # A tied output layer on the last stage adds its gradient to that of the first stage's
        # embedding.
        pipeline_ends = [sorted({pipeline[0], pipeline[-1]}) for pipeline in layout.groups("pp")]
        embedding = self._own_group_or_none(pipeline_ends)

        collection = ProcessGroupCollection(
            tp=self._along(layout, "tp"),
            cp=self._along(layout, "cp"),
            dp=self._along(layout, "dp"),
            pp=self._along(layout, "pp"),
            mp=self._along(layout, "tp", "pp"),
            tp_cp=self._along(layout, "tp", "cp"),
            dp_cp=dp_cp,
            tp_dp_cp=self._along(layout, "tp", "cp", "dp"),
            hcp=None,
            ep=self._along(layout, "ep"),
            expt_tp=self._along(layout, "etp"),
            tp_ep=self._along(layout, "etp", "ep"),
            tp_ep_pp=self._along(layout, "etp", "ep", "pp"),
            expt_dp=expert_dp,
            embd=embedding,
            pos_embd=None,
            intra_dp_cp=dp_cp,
            intra_expt_dp=expert_dp,
            inter_dist_opt=None,
            # It must hold every rank of the model: with fewer, the gradient norm of the distributed
            # optimizer is wrong and no error says so.
            intra_dist_opt=self._world,
        )

        return RoleGroups(
            layout,
            layout.coordinates(self._rank),
            collection,
            results=self._along(layout, "cp", "dp", "pp"),
            first_copy=self._own_group_or_none([layout.first_copy]),
            machine=self.machine,
        )

    def engine_groups(self, layout: EngineLayout) -> EngineGroups:
        """This rank's groups in the inference engine."""
        same_tp_rank = [list(ranks) for ranks in zip(*layout.replicas, strict=True)]
        return EngineGroups(
            layout,
            *layout.place(self._rank),
            tp=self._own_group(layout.replicas),
            replicas=self._own_group(same_tp_rank),
            exchange=self._own_group(layout.exchanges),
            machine=self.machine,
            machines=self._machines,
        )

    def _machine(self) -> Machine:
        ranks_of: dict[str, list[int]] = {}
        for rank, name in enumerate(self._machines):
            ranks_of.setdefault(name, []).append(rank)

        ranks = self._own_group(list(ranks_of.values()))
        leaders = self._own_group_or_none([[ranks[0] for ranks in ranks_of.values()]])
        return Machine(ranks, leaders, len(ranks_of))

    def _along(self, layout: ParallelLayout, *axes: Axis) -> Group:
        return self._own_group(layout.groups(*axes))

    def _own_group(self, rank_lists: Sequence[Sequence[int]]) -> Group:
        group = self._own_group_or_none(rank_lists)
        assert group is not None, f"rank {self._rank} is in none of {rank_lists}"
        return group

    def _own_group_or_none(self, rank_lists: Sequence[Sequence[int]]) -> Group | None:
        """Create the groups of all lists, and return the one that this rank is in, if any."""
        own_group = None
        for ranks in rank_lists:
            key = tuple(sorted(ranks))
            is_alone = len(key) == 1
            if key not in self._groups and (self._rank in key or not is_alone):
                # torch numbers groups on each rank, so all ranks make those of several ranks.
                self._groups[key] = dist.new_group(
                    list(key), timeout=self._timeout, use_local_synchronization=is_alone
                )
            if self._rank in key:
                own_group = self._groups[key]
        return own_group
