"""The hand-over of the policy's weights to the engine, before each generation.

Weights that training never changes come once, others each time. Adapters that the engine does not
add by itself are merged first. This file does not know engines, or how slices travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from mrlhf.reshard.execute import Resharder, ReshardStats
from mrlhf.training.merging import MergedWeights


@dataclass
class HandOver:
    """Brings weights into the engine; every rank calls it together."""

    each_time: Resharder
    once: Resharder | None = None  # brings what the engine keeps; None if there is nothing to bring
    merged: MergedWeights | None = None  # from where `each_time` takes its weights, if not None

    def run(self, meanwhile: Callable[[], None] | None = None) -> ReshardStats:
        """Do what `Resharder.run` does."""
        before = ReshardStats(0, 0, 0, 0.0)
        if self.once is not None:
            before = self.once.run()
            self.once = None
        if self.merged is None:
            return before + self.each_time.run(meanwhile)

        squares = self.merged.update()
        dist.all_reduce(squares)
        lost, added = squares.sqrt().tolist()
        merge_error = lost / added if added else 0.0
        return replace(self.each_time.run(meanwhile), merge_error=merge_error)
