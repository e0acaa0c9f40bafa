"""The phases that a rank goes through: where it is, how long each takes, and where it may stop.

The trainer enters phases. The code in a phase reports its progress, and asks before each unit of
work whether to go on. Other threads read where the rank is. This file knows no phase by name, nor
what is done with its measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch.profiler import record_function

from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.device_memory import START, DeviceMemory


@dataclass(frozen=True)
class PhaseProgress:
    """How much of a phase is done: `done` of `of` units; `unit` is their name, in the plural."""

    done: int
    of: int
    unit: str


class Span(NamedTuple):
    """One stay in a phase."""

    phase: str
    begin: float  # seconds since 1970
    seconds: float
    busy: float  # CPU seconds that the threads of this process computed in it


class Phases:
    """The phases of one rank. The main thread enters them; any thread may read the attributes."""

    def __init__(
        self,
        stops: AgreedStop | None = None,
        synchronize: Callable[[], None] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Begin in the phase "start"; nobody asks the ranks to stop if `stops` is None.

        `synchronize` waits for the device: an accelerator is still working when the call that
        started the work returns. `memory` is told the phases; None: it has no bound.
        """
        self.memory = memory or DeviceMemory()
        self.stops = stops or AgreedStop(dist.HashStore(), rank=0, world_size=1)
        self.name = START  # of the innermost phase
        self.entered = 0  # how many phases have begun or ended so far
        self.progress: PhaseProgress | None = None  # None where it is not known
        self.spans: list[Span] = []  # since `take_spans`, in the order in which they ended
        self._synchronize = synchronize
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the rank entered the phase or came back to it."""
        return time.monotonic() - self._since

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Be in phase `name` in the body of a `with` statement; phases may nest.

        People and reports of hangs are shown `name`, the body is timed until the device has done
        its work, and torch's profiler has a range of that name.
        """
        outer = self.name
        start = self._now()
        begin = time.time()
        busy = time.process_time()

        self._change(name)
        with record_function(name):
            yield
        # If the body raises, the phase remains, since that is where the process fails.
        self._change(outer)

        seconds = self._now() - start
        self.spans.append(Span(name, begin, seconds, time.process_time() - busy))

    def advance(self, done: int, of: int, unit: str) -> None:
        """Say that `done` of `of` units of the phase are done."""
        self.progress = PhaseProgress(done, of, unit)

    def interruptible(self) -> AbstractContextManager[Callable[[int], bool]]:
        """Let the ranks stop before each unit of work of the body, such as a micro-batch.

        Every rank of the run calls it in the same order, even with other units or none. The body
        calls the function that it gets before each unit, and leaves the unit out if the answer is
        False. If the ranks stop in the body, Interrupted is raised after it on every rank.
        """
        return self.stops.stretch()

    def take_spans(self) -> list[Span]:
        """The spans since the last call."""
        spans = self.spans
        self.spans = []
        return spans

    def _change(self, name: str) -> None:
        self.name = name
        self.entered += 1
        self.memory.enter(name)
        self.progress = None
        self._since = time.monotonic()

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


def seconds_by_phase(spans: Sequence[Span]) -> dict[str, float]:
    """The seconds of each phase, added up if it was entered several times."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.phase] = seconds.get(span.phase, 0.0) + span.seconds
    return seconds


def timing_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/<phase>` of each phase."""
    return {f"timing_s/{phase}": spent for phase, spent in seconds.items()}
