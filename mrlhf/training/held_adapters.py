"""The adapters of one sharded model: turned off, exchanged for others, and their gradients.

This file does not know what the model computes, nor when it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.models.adapters import Adapters
from mrlhf.models.lora import is_adapter
from mrlhf.weights.shard import Slot


class HeldAdapters:
    """The adapters of this rank's chunks; there may be none.

    Attributes:
        slots: their factors.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        slots: Sequence[Slot],
        needing_weights: Callable[[], AbstractContextManager[None]],
        let_reader_finish: Callable[[], None],
    ) -> None:
        """Take the adapters, and what the engine knows about its weights.

        Within `needing_weights` all weights are there, with the last optimizer step in them.
        `let_reader_finish` waits for a thread that still copies them, as a checkpoint does.
        """
        self._chunks = chunks
        self.slots = [slot for slot in slots if is_adapter(slot.piece.name)]
        self._needing_weights = needing_weights
        self._let_reader_finish = let_reader_finish

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base model alone, as long as this lasts."""
        modules = chain.from_iterable(chunk.modules() for chunk in self._chunks)
        adapters = [module for module in modules if isinstance(module, Adapters)]
        for module in adapters:
            module.is_on = False
        try:
            yield
        finally:
            for module in adapters:
                module.is_on = True

    def copy(self) -> list[Tensor]:
        """Return a copy of this rank's adapters as they are, for `exchanged`."""
        with self._needing_weights():
            return [slot.parameter.detach().clone() for slot in self.slots]

    @contextmanager
    @torch.no_grad()
    def exchanged(self, adapters: Sequence[Tensor]) -> Iterator[None]:
        """Compute with other adapters, a result of `copy`, as long as this lasts."""
        with self._needing_weights():
            own = self.copy()
            self._let_reader_finish()  # main weights in float32 are the parameters themselves
            self._put(adapters)
            try:
                yield
            finally:
                self._put(own)

    @torch.no_grad()
    def _put(self, adapters: Sequence[Tensor]) -> None:
        for slot, values in zip(self.slots, adapters, strict=True):
            slot.parameter.copy_(values)

    def sum_parts(self, group: dist.ProcessGroup) -> None:
        """Sum the gradients of which each rank of the group, which splits an expert, has a part."""
        parts = [
            parameter.main_grad
            for chunk in self._chunks
            for parameter in chunk.parameters()
            if getattr(parameter, "is_partial", False)
        ]
        if parts and group.size() > 1:
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=group)
            sums = flat.split([part.numel() for part in parts])
            for part, whole in zip(parts, sums, strict=True):
                part.copy_(whole.view(part.shape))
