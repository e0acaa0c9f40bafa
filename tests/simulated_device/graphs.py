"""CUDA graphs of the simulated device: the operators of a capture, replayed on the same memory.

What a graph computed while it was captured is spoilt afterwards, since a GPU would not have
computed it: only a replay gives numbers. A graph knows addresses: it does not keep alive what was
there before the capture, and a replay is refused if nothing is there any more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.simulated_device.state import DEVICE


class _Place(NamedTuple):
    """A tensor by its address."""

    address: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The tensor that lies there now."""
        storage = DEVICE.memory.at(self.address)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class SimulatedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.kernels: Counter[str] = Counter()
        self._calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self._made: list[Tensor] = []
        self._own: set[int] = set()  # storages that the capture made
        self._before: list[tuple[Tensor, Tensor]] = []  # what it wrote over, and its numbers
        self._thread = threading.get_ident()

    def add(self, call: Callable[[], Any], outs: Sequence[Any], made: Sequence[Tensor]) -> None:
        """Record a call, the tensors that it must fill again, and those that it made."""
        if self.is_of_this_thread:
            self._made += made
            self._own.update(x.untyped_storage()._cdata for x in made)
            self._calls.append((call, [x for x in outs if self._is_own(x)]))

    def save(self, written: Sequence[Any]) -> None:
        """Remember tensors that are now written to, since a capture on a GPU writes nothing."""
        for tensor in written:
            if isinstance(tensor, Tensor) and not self._is_own(tensor):
                self._before.append((tensor, tensor.clone()))

    def later(self, func: Any, arguments: tuple[Any, Any]) -> Callable[[], Any]:
        """A call of an operator on what lies at the addresses of its arguments then."""
        flat, spec = tree_flatten(arguments)
        places = [self._place(x) if isinstance(x, Tensor) else x for x in flat]

        def call() -> Any:
            flat = [x.tensor() if isinstance(x, _Place) else x for x in places]
            args, kwargs = tree_unflatten(flat, spec)
            return func(*args, **kwargs)

        return call

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._own

    def _place(self, tensor: Tensor) -> Tensor | _Place:
        address = tensor.untyped_storage().data_ptr()
        if self._is_own(tensor) or not DEVICE.memory.has(address):
            return tensor
        offset = int(tensor.storage_offset())
        return _Place(address, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

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
        """Overwrite what the capture made, and undo what it wrote to other memory."""
        with torch.no_grad():
            for tensor in self._made:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
            for tensor, numbers in reversed(self._before):
                tensor.copy_(numbers)
        self._made.clear()
        self._before.clear()


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
