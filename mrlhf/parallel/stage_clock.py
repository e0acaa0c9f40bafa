"""Measures how long the stages of a pipeline stand idle while they wait for each other.

megatron-core's schedules start and stop named timers around whatever they do. A `StageClock` is
handed to them in the place of these timers. It knows neither models nor micro-batches.
"""

from __future__ import annotations

import time
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
        self._began = 0.0
        self._ended = 0.0
        self._exchange_began = 0.0
        self._waited = 0.0

    def begin(self) -> None:
        """Begin to measure one run of the schedule."""
        self._began = self._now()
        self._ended = self._began
        self._waited = 0.0

    def idle_and_busy(self) -> tuple[float, float]:
        """What this stage adds to two sums over all stages: seconds idle, and seconds busy.

        The first stage has the first forward and the last backward pass, so it is there from the
        beginning of the schedule to its end. It adds the idle time of all stages as if none of them
        had been busy, and each stage takes its busy time off.
        """
        span = self._ended - self._began
        busy = span - self._waited
        return (self._stages * span if self._stage == 0 else 0.0) - busy, busy

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """The timer of this name; the level does not matter."""
        return _Timer(self, name)

    def start(self, name: str) -> None:
        """Take note that what `name` means begins."""
        if name.endswith(_EXCHANGE):
            self._exchange_began = self._now()

    def stop(self, name: str) -> None:
        """Take note that it ends."""
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
