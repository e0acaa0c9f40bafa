"""Measures where the time of an update goes: to idle stages of a pipeline, and to a slow replica.

A replica is the ranks that hold one copy of the model. They wait for each other within a pass, so
one slow rank makes its whole replica slow. Replicas meet at the end of a pass, when their gradients
are added up. If experts are spread over several replicas, these wait for each other within a pass,
too, and their times are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrlhf.device import Moment, Span, seconds_in
from mrlhf.models.flops import forward_flops, sequence_flops
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.replica_speed import compare_replicas
from mrlhf.parallel.stage_clock import StageClock


class UpdateClock:
    """The clock of one model's updates; all of its ranks call each method together.

    `stages` is the clock of this pipeline stage; None without a pipeline.
    """

    def __init__(
        self, spec: ModelSpec, groups: RoleGroups, device: torch.device, stages: StageClock | None
    ) -> None:
        self._spec = spec
        self._groups = groups
        self._device = device
        self._stages = stages
        self._began = Moment(device)
        self._passes: list[Span] = []
        self._operations = 0

    def start(self, packs: Sequence[Pack]) -> None:
        """Start the clock at the beginning of a pass over this replica's packs."""
        for pack in packs:
            lengths = pack.lengths.tolist()
            self._operations += sum(sequence_flops(self._spec, lengths, pack.row_counts.tolist()))
            for tokens, times in [] if pack.trees is None else pack.trees.repeats:
                self._operations -= times * forward_flops(self._spec, tokens, outputs=0)
        self._began = Moment(self._device)

    def stop(self) -> None:
        """Stop the clock at the end of a pass; from now on the replica waits for others."""
        self._passes.append((self._began, Moment(self._device)))

    def metrics(self, prefix: str) -> dict[str, float]:
        """The `perf/...` metrics of `prefix` since the last call, without those not measured."""
        return self._bubble(prefix) | self._slowest(prefix)

    def _bubble(self, prefix: str) -> dict[str, float]:
        if self._stages is None:
            return {}
        seconds = torch.tensor(self._stages.take(), dtype=torch.float64, device="cpu")
        torch.distributed.all_reduce(seconds, group=self._groups.world)
        idle, busy = seconds.tolist()
        return {f"perf/bubble/{prefix}": idle / busy} if busy else {}

    def _slowest(self, prefix: str) -> dict[str, float]:
        spent = seconds_in(self._passes) / self._operations if self._operations else 0.0
        self._passes = []
        self._operations = 0

        first_rank = self._groups.layout.rank_at(dp=self._groups.coordinates.dp)
        slowest = compare_replicas(spent, first_rank, self._groups.world)
        if slowest is None:
            return {}
        return {
            f"perf/slowest_update/{prefix}": slowest.ratio,
            f"perf/slowest_update_rank/{prefix}": slowest.rank,
        }
