"""Measures how long the stages of a pipeline stand idle while they wait for each other.

megatron-core's schedules start and stop named timers around whatever they do. A `StageClock` is
handed to them in the place of these timers. It knows neither models nor micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_EXCHANGE = ("-send", "-recv")
"""How the names of the timers around an exchange with a neighbouring stage end."""


class StageClock:
    """The timers of one stage, as `TransformerConfig.timers` wants them.

    A stage waits while it exchanges something with a neighbour, the transfer included. Before each
    exchange the stages tell each other a shape, for which a GPU has to be waited for anyway. The
    clock waits for the GPU at the same places, so what it measures there is right as well.
    """

    def __init__(self, device: torch.device, stage: int, stages: int) -> None:
        """Measure nothing yet; `stage` is the number of this one, from 0."""
        self._device = device
        self._stage = stage
        self._stages = stages
        self._exchange_began = 0.0
        self._ended = 0.0  # the last exchange or backward pass; what follows is no stage's alone
        self._waited = 0.0
        self._idle = 0.0
        self._busy = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the run of a schedule in the body of a `with` statement, unless it raises."""
        began = self._now()
        self._waited = 0.0
        yield
        span = self._ended - began
        busy = span - self._waited

        # The first stage has the first forward and the last backward pass, so its span is that of
        # the whole schedule. Of that, each stage is idle while it is not busy.
        whole = self._stages * span if self._stage == 0 else 0.0
        self._idle += whole - busy
        self._busy += busy

    def take(self) -> tuple[float, float]:
        """Seconds idle and seconds busy since the last call, to be summed over the stages."""
        taken = (self._idle, self._busy)
        self._idle = 0.0
        self._busy = 0.0
        return taken

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """The timer `name` of megatron-core; the level does not matter."""
        return _Timer(self, name)

    def start(self, name: str) -> None:
        """Note the begin of an exchange."""
        if name.endswith(_EXCHANGE):
            self._exchange_began = self._now()

    def stop(self, name: str) -> None:
        """Note the end of an exchange or of a backward pass."""
        if name.endswith(_EXCHANGE):
            self._ended = self._now()
            self._waited += self._ended - self._exchange_began
        elif name == "backward-compute":
            self._ended = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Timer(NamedTuple):
    """One timer of megatron-core's; it never waits for other ranks."""

    clock: StageClock
    name: str

    def start(self, barrier: bool = False) -> None:
        """Start it."""
        self.clock.start(self.name)

    def stop(self, barrier: bool = False) -> None:
        """Stop it."""
        self.clock.stop(self.name)
