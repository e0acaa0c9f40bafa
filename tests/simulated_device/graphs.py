"""CUDA graphs of the simulated device: the operators of a capture, replayed on the same memory.

What a graph computed while it was captured is spoilt afterwards, since a GPU would not have
computed it: only a replay gives numbers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.simulated_device.state import DEVICE


class SimulatedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.kernels: Counter[str] = Counter()
        self._calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self._made: list[Tensor] = []
        self._thread = threading.get_ident()

    def add(self, call: Callable[[], Any], outs: Sequence[Any], made: Sequence[Tensor]) -> None:
        """Record a call, the tensors that it must fill again, and those that it made."""
        if self.is_of_this_thread:
            self._calls.append((call, [x for x in outs if isinstance(x, Tensor)]))
            self._made += made

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread captures it; others work beside it."""
        return threading.get_ident() == self._thread

    def pool(self) -> tuple[int, int]:
        """The handle of the graph's memory."""
        return (0, 1)

    def replay(self) -> None:
        """Run the calls again on what their inputs hold now."""
        DEVICE.refuse_in_capture("replay")
        DEVICE.counts.replays += 1
        DEVICE.counts.replayed += self.kernels.total()
        with torch.no_grad():
            for call, outs in self._calls:
                again = [x for x in tree_flatten(call())[0] if isinstance(x, Tensor)]
                for old, new in zip(outs, again, strict=False):
                    if old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def spoil(self) -> None:
        """Overwrite what the capture made."""
        with torch.no_grad():
            for tensor in self._made:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        self._made.clear()


@contextmanager
def capture(graph: SimulatedGraph, *arguments: Any, **options: Any) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    DEVICE.refuse_in_capture("capture")
    is_global = options.get("capture_error_mode", "global") != "thread_local"
    DEVICE.capture_forbids = None if is_global else threading.get_ident()
    DEVICE.capturing = graph
    DEVICE.counts.captures += 1
    try:
        yield
    finally:
        DEVICE.capturing = None
    graph.spoil()
