"""Fills the weights of all replicas of a model from its files, which one replica reads.

A file system that all machines share then serves each weight once, whatever the number of ranks.
This file does not know what the weights are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from mrlhf.errors import WeightError
from mrlhf.models.spec import ModelSpec
from mrlhf.models.weight_files import read_model
from mrlhf.parallel.collectives import raise_together
from mrlhf.parallel.groups import RoleGroups
from mrlhf.weights.shard import Slot


def read_for_all(
    path: str | Path,
    spec: ModelSpec,
    slots: Sequence[Slot],
    needs_head: bool,
    groups: RoleGroups,
) -> bool:
    """Fill the `slots` of every rank, as `read_model` does; every rank calls it.

    A WeightError of one rank is raised on all.
    """
    replicas: dict[int, dist.ProcessGroup] = {}  # of the parameter with this id
    same = groups.collection
    for slot in slots:
        replicas[id(slot.parameter)] = same.expt_dp if slot.piece.of_expert else same.dp_cp
    own = [slot for slot in slots if replicas[id(slot.parameter)].rank() == 0]

    has_head = False
    error = None
    try:
        has_head = read_model(path, spec, own, needs_head)
    except WeightError as failure:
        error = str(failure)
    raise_together(error, WeightError, groups.world)

    # All ranks of a pipeline stage have the same parameters in the same order.
    for parameter in {id(slot.parameter): slot.parameter for slot in slots}.values():
        group = replicas[id(parameter)]
        if group.size() > 1:
            dist.broadcast(parameter.detach(), group=group, group_src=0)
    return has_head
