"""How far the update of a model has come, so that an interrupted update can go on.

It does not know the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mrlhf.metrics import Tally
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import MiniBatchResult


@dataclass
class UpdateProgress:
    """The mini-batches of an update that are done; the same on every rank once it is complete."""

    mini_batches: int = 0  # the number that have been trained on, over all epochs
    # their metrics; those of the mini-batches since the last `complete` are missing
    total: Tally = field(default_factory=Tally)
    # in bypass mode, float32 [batch, response_len], each token's log-probability when it was first
    # trained on, before the update was interrupted; else None
    first_logprobs: Tensor | None = None
    _since: list[MiniBatchResult] = field(default_factory=list)

    def add(self, result: MiniBatchResult) -> None:
        """Count a mini-batch that has been trained on."""
        self._since.append(replace(result, kept=[]))
        self.mini_batches += 1

    def complete(self, engine: ModelEngine) -> None:
        """Bring `total` up to date, in one exchange between the ranks; every rank calls it."""
        self.total = engine.metrics_of(self._since, self.total)
        self._since = []

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as numbers and a tensor."""
        assert not self._since, "the metrics of some mini-batches are not in the total"
        return {
            "mini_batches": self.mini_batches,
            "total": self.total.state_dict(),
            "first_logprobs": self.first_logprobs,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> UpdateProgress:
        """The inverse of `state_dict`."""
        total = Tally.from_state(state["total"])
        return UpdateProgress(state["mini_batches"], total, state["first_logprobs"])
