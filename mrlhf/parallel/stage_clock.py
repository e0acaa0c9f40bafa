"""Measures how long the stages of a pipeline stand idle while they wait for each other.

megatron-core's schedules start and stop named timers around whatever they do. A `StageClock` is
handed to them in the place of these timers. It knows neither models nor micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mrlhf.device import Moment, Span, seconds_in

_EXCHANGE = ("-send", "-recv")
"""How the names of the timers around an exchange with a neighbouring stage end."""


class StageClock:
    """The timers of one stage, as `TransformerConfig.timers` wants them.

    A stage waits while it exchanges something with a neighbour, the transfer included. The clock of
    a GPU's stage notes moments in the GPU's work, and reads them when the times are taken.
    """

    def __init__(self, device: torch.device, stage: int, stages: int) -> None:
        """Measure nothing yet; `stage` is the number of this one, from 0."""
        self._device = device
        self._stage = stage
        self._stages = stages
        self._exchange_began = Moment(device)
        self._ended = Moment(device)  # the last exchange or backward pass
        self._exchanges: list[Span] = []
        self._spans: list[Span] = []  # of the measured schedules since the last `take`
        self._waits: list[Span] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the run of a schedule in the body of a `with` statement, unless it raises."""
        began = Moment(self._device)
        self._exchanges = []
        yield
        # What follows the last exchange or backward pass is no stage's alone.
        self._spans.append((began, self._ended))
        self._waits += self._exchanges

    def take(self) -> tuple[float, float]:
        """Seconds idle and seconds busy since the last call, to be summed over the stages."""
        span = seconds_in(self._spans)
        busy = span - seconds_in(self._waits)
        self._spans = []
        self._waits = []
        # The first stage has the first forward and the last backward pass, so its span is that of
        # the whole schedule. Of that, each stage is idle while it is not busy.
        whole = self._stages * span if self._stage == 0 else 0.0
        return whole - busy, busy

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """The timer `name` of megatron-core; the level does not matter."""
        return _Timer(self, name)

    def start(self, name: str) -> None:
        """Note the begin of an exchange."""
        if name.endswith(_EXCHANGE):
            self._exchange_began = Moment(self._device)

    def stop(self, name: str) -> None:
        """Note the end of an exchange or of a backward pass."""
        if name.endswith(_EXCHANGE):
            self._ended = Moment(self._device)
            self._exchanges.append((self._exchange_began, self._ended))
        elif name == "backward-compute":
            self._ended = Moment(self._device)


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
