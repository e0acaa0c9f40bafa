"""The experts that the passes of a policy replay, and their disagreement with the engine's.

It knows records of experts and whole passes. It knows neither routers nor losses.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from mrlhf.batch import Experience, Rollout
from mrlhf.parallel.machine import OpenTable
from mrlhf.parallel.pack_routing import PassRouting
from mrlhf.records import ExpertRecord
from mrlhf.rl.names import RouterReplay
from mrlhf.training.engine import ModelEngine


class EvaluationRouting:
    """The routing of the pass that evaluates the policy; every rank makes one together.

    Attributes:
        of_pass: for the packs of the pass.
    """

    def __init__(self, engine: ModelEngine, rollout: Rollout, replay: RouterReplay) -> None:
        """Prepare the pass of a policy with mixtures.

        With `replay` "rollout" the pass replays the engine's experts; with "old" the experts that
        it chooses are kept.
        """
        self._engine = engine
        self._rollout = rollout
        self._table: OpenTable | None = None
        self._kept: ExpertRecord | None = None
        if replay == "old":
            self._keep()

        recorded = rollout.experts
        assert recorded is not None or replay != "rollout", "the engine has recorded no experts"
        self.of_pass = PassRouting(
            engine.device,
            replayed=recorded if replay == "rollout" else None,
            compared=recorded,
            kept=self._kept,
        )

    def kept(self) -> ExpertRecord | None:
        """The experts that the policy chose, after the pass; every rank calls it once."""
        if self._table is not None:
            self.of_pass.write()
            self._table.complete()
        return self._kept

    def disagreement(self) -> float | None:
        """The share of pairs of response token and mixture with other experts than the engine's.

        Every rank calls it, after the pass, and all get the same. It is NaN if there is nothing to
        compare, and None without a record. The experts of a token are those that its
        log-probability comes from.
        """
        record = self._rollout.experts
        if record is None:
            return None
        differing = self.of_pass.differing.cpu()
        dist.all_reduce(differing, group=self._engine.groups.world)

        prompts = torch.tensor(self._rollout.prompt_lengths, dtype=torch.int64)
        tokens = (record.counts - prompts + 1).clamp(min=0).sum()
        pairs = int(tokens) * record.chosen.shape[1]
        return int(differing) / pairs if pairs else math.nan

    def _keep(self) -> None:
        """Make room for the experts of all tokens but the last one of each response."""
        experts = self._engine.spec.experts
        assert experts is not None
        prompts = torch.tensor(self._rollout.prompt_lengths, dtype=torch.int64)
        counts = prompts + torch.tensor(self._rollout.response_lengths, dtype=torch.int64) - 1
        shape = (int(counts.sum()), experts.mixtures, experts.per_token)
        self._table = self._engine.groups.machine.table(shape, experts.record_dtype)
        self._kept = ExpertRecord(self._table.entries, counts.cumsum(0) - counts, counts)


def replayed_in_update(experience: Experience, replay: RouterReplay) -> ExpertRecord | None:
    """The experts that the passes of an update replay; None if the routers choose by themselves."""
    if replay == "none":
        return None
    record = experience.rollout.experts if replay == "rollout" else experience.experts
    assert record is not None, f"nothing was recorded that router_replay {replay} could replay"
    return record
