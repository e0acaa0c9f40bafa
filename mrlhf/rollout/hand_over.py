"""The hand-over of the policy's weights to the engine, before each generation.

Weights that training never changes come once, others each time. Adapters that the engine does not
add by itself are merged first. This file does not know engines, or how slices travel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from mrlhf.reshard.execute import Resharder, ReshardStats
from mrlhf.training.merging import MergedWeights
from mrlhf.training.residency import Residency


@dataclass
class HandOver:
    """Brings weights into the engine; every rank calls it together."""

    policy: Residency  # has the policy's weights on the device
    each_time: Resharder
    once: Resharder | None = None  # brings what the engine keeps; None if there is nothing to bring
    merged: MergedWeights | None = None  # from where `each_time` takes its weights, if not None
    # Within it the policy's weights stay on the device, since the engine reads some of them there.
    _lent: ExitStack = field(default_factory=ExitStack)
    _shares: bool = False  # whether there are such weights

    @property
    def nbytes(self) -> int:
        """The bytes of merged weights on this rank."""
        return 0 if self.merged is None else self.merged.nbytes

    def run(self, meanwhile: Callable[[], None] | None = None) -> ReshardStats:
        """Do what `Resharder.run` does; weights that the engine shares stay where they are."""
        with ExitStack() as stack:
            stack.enter_context(self.policy.needing("params"))
            self.give_back()
            self._shares |= self.each_time.shares or (self.once is not None and self.once.shares)
            stats = self._run(meanwhile)
            if self._shares:
                self._lent = stack.pop_all()
        return stats

    def give_back(self) -> None:
        """The engine reads the policy's weights no more, until `run` is called again."""
        self._lent.close()

    def _run(self, meanwhile: Callable[[], None] | None) -> ReshardStats:
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
