"""Fills a model's weights on all replicas from files that one of them reads: a file system that all
machines share serves each weight once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mrlhf.errors import WeightError
from mrlhf.models.spec import ModelSpec
from mrlhf.models.weight_files import read_model
from mrlhf.parallel.collectives import together
from mrlhf.parallel.groups import RoleGroups
from mrlhf.weights.shard import Slot


def read_for_all(
    path: str | Path, spec: ModelSpec, slots: Sequence[Slot], needs_head: bool, groups: RoleGroups
) -> bool:
    """Fill the `slots` of every rank, as `read_model` does; every rank calls it."""

    def replicas(slot: Slot) -> dist.ProcessGroup:
        same = groups.collection
        return same.expt_dp if slot.piece.of_expert else same.dp_cp

    with together(WeightError, groups.world):
        read = [slot for slot in slots if replicas(slot).rank() == 0]
        has_head = read_model(path, spec, read, needs_head)

    # The ranks of a pipeline stage have the same parameters in the same order.
    for slot in {id(slot.parameter): slot for slot in slots}.values():
        if replicas(slot).size() > 1:
            as_bytes = slot.parameter.detach().view(-1).view(torch.uint8)
            dist.broadcast(as_bytes, group=replicas(slot), group_src=0)
    return has_head
