"""The state of the simulated device of this process; there is one device in a process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tests.simulated_device.counts import Counts, place
from tests.simulated_device.host_memory import HostMemory
from tests.simulated_device.memory import Memory
from tests.simulated_device.orders import Collective

if TYPE_CHECKING:
    from tests.simulated_device.graphs import SimulatedGraph


class Streams(threading.local):
    """What a thread knows of streams."""

    beside = False


class SimulatedDevice:
    """What the device of this process holds and has done.

    Attributes:
        index: of the device among those of the machine; a fork may change it before it uses it.
        counts: everything so far.
        capturing: the graph that is being captured.
        streams: whether the work of a thread is beside that of others.
        capture_forbids: the thread that may not wait meanwhile; None: no thread may.
        collectives: of this rank in their order, on device and host.
        decoded: calls of attention in decode, by whether query heads are packed.
        compiled: calls of functions that `torch.compile` would compile, by name.
    """

    def __init__(self) -> None:
        self.index = 0
        self.counts = Counts()
        self.by_phase: dict[str, Counts] = {}
        self.memory = Memory()
        self.host = HostMemory()
        self.capturing: SimulatedGraph | None = None
        self.capture_forbids: int | None = None
        self.streams = Streams()
        self.collectives: list[Collective] = []
        self.compiled: Counter[str] = Counter()
        self.decoded: Counter[str] = Counter()

    @property
    def device(self) -> torch.device:
        """The device in torch's words."""
        return torch.device("cuda", self.index)

    def wait(self, kind: str, until: int | None = None) -> None:
        """The host waits for the device, which is forbidden while a graph is captured."""
        self.refuse_in_capture(kind)
        self.counts.waits[(kind, place())] += 1
        self.host.wait(until)

    def synchronize(self) -> None:
        """`torch.cuda.synchronize`."""
        self.refuse_in_capture("synchronize")
        self.counts.synchronized[("synchronize", place())] += 1
        self.host.wait()

    def refuse_in_capture(self, kind: str) -> None:
        """Raise as CUDA does if a graph is being captured."""
        forbidden = self.capture_forbids in (None, threading.get_ident())
        if self.capturing is not None and forbidden:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({kind}) at "
                f"{place()}"
            )

    def launch(self, name: str) -> None:
        """A kernel is launched, or captured."""
        if self.capturing is not None and self.capturing.is_of_this_thread:
            self.capturing.kernels[name] += 1
        else:
            self.counts.kernels[(name, place())] += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keep counts and the peak of memory of the body under `name`, and not of an outer one."""
        before = self.counts.copy()
        inner_before = sum(self.by_phase.values(), Counts())
        with self.memory.phase(name):
            yield
        inner = sum(self.by_phase.values(), Counts()) - inner_before
        own = self.counts - before - inner
        self.by_phase[name] = self.by_phase.get(name, Counts()) + own

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Gives counts that hold, after the body, what the body did."""
        before = self.counts.copy()
        found = Counts()
        yield found
        vars(found).update(vars(self.counts - before))


DEVICE = SimulatedDevice()
