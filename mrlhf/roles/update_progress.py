"""How far the update of a model has come, so that an interrupted update can go on.

It does not know the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mrlhf.metrics import Tally


@dataclass
class UpdateProgress:
    """The mini-batches of an update that are done; the same on every rank.

    Attributes:
        mini_batches: how many have been trained on, over all epochs.
        total: their metrics.
        first_logprobs: in bypass mode, float32 [batch, response_len], each token's log-probability
            when it was first trained on, before the update was interrupted; else None.
    """

    mini_batches: int = 0
    total: Tally = field(default_factory=Tally)
    first_logprobs: Tensor | None = None

    def add(self, tally: Tally) -> None:
        """Take note of a mini-batch that has been trained on."""
        self.total.merge(tally)
        self.mini_batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything, as numbers and a tensor."""
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
