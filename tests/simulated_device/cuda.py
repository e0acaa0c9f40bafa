"""Puts the simulated device in place of `torch.cuda`, and makes this process see it."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.trace_rules
import torch.utils._device

from tests.simulated_device import collectives, operators
from tests.simulated_device.counts import place
from tests.simulated_device.graphs import SimulatedGraph, capture
from tests.simulated_device.state import DEVICE
from tests.simulated_device.tensors import DeviceMode, SimulatedTensor

NAME = "NVIDIA H200"
CAPABILITY = (9, 0)
DEVICES = 8


class Stream:
    """Stands for a stream; all work is in one order, but a new stream must wait for another one."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.device = DEVICE.device
        self._has_waited = False

    def wait_stream(self, stream: Stream) -> None:
        """The order is kept anyway."""
        self._has_waited = True

    def wait_event(self, event: Event) -> None:
        """The order is kept anyway."""
        self._has_waited = True

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Work in the body is of this stream."""
        if not self._has_waited:
            raise RuntimeError(f"a stream computes before it has waited for another at {place()}")
        outer = DEVICE.streams.beside
        DEVICE.streams.beside = True
        yield
        DEVICE.streams.beside = outer

    def record_event(self, event: Event | None = None) -> Event:
        """An event at this moment."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all is done."""
        return DEVICE.host.is_quiet

    def synchronize(self) -> None:
        """The host waits."""
        DEVICE.wait("Stream.synchronize")


class Event:
    """Stands for an event: a moment in the order of copies."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._moment = 0
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """The moment is now."""
        self._moment = DEVICE.host.now
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing: all work is in one order."""

    def query(self) -> bool:
        """Copies are done as soon as they are asked for."""
        DEVICE.host.wait(self._moment)
        return True

    def synchronize(self) -> None:
        """The host waits for what was before the event."""
        DEVICE.wait("Event.synchronize", self._moment)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host."""
        return 1000 * (end._seconds - self._seconds)


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _synchronize(*arguments: Any) -> None:
    DEVICE.synchronize()


@functools.cache
def _stream() -> Stream:
    return Stream()


def install() -> None:
    """Make this process see a GPU. `guard.load_guard` comes before; mrlhf is imported after."""
    assert "mrlhf" not in sys.modules, "the simulated device is installed before mrlhf is imported"
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.autograd.set_multithreading_enabled(False)
    _install_cuda()
    _install_host()
    _install_modules()
    operators.install()
    collectives.install()
    DeviceMode().__enter__()


def _install_cuda() -> None:
    memory = DEVICE.memory
    random = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
    }

    replaced: dict[str, Any] = {
        **random,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": _nothing,
        "init": _nothing,
        "device_count": lambda: DEVICES,
        "current_device": lambda: DEVICE.device,
        "set_device": _nothing,
        "synchronize": _synchronize,
        "check_error": _check_error,
        "cudart": lambda: types.SimpleNamespace(
            cudaHostRegister=DEVICE.host.register, cudaHostUnregister=DEVICE.host.unregister
        ),
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: types.SimpleNamespace(
            name=NAME, total_memory=memory.total, multi_processor_count=132, major=9, minor=0
        ),
        "is_bf16_supported": lambda *_, **__: True,
        "empty_cache": memory.empty_cache,
        "mem_get_info": lambda *_: (memory.free, memory.total),
        "memory_allocated": lambda *_: memory.allocated,
        "memory_reserved": lambda *_: memory.reserved,
        "max_memory_allocated": lambda *_: memory.peak,
        "reset_peak_memory_stats": lambda *_: memory.reset_peak(),
        "MemPool": object,
        "use_mem_pool": lambda *_: memory.pool(),
        "default_generators": _Generators(),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: _stream(),
        "default_stream": lambda *_: _stream(),
        "stream": Stream.entered,
        "set_stream": _nothing,
        "is_current_stream_capturing": lambda: DEVICE.capturing is not None,
        "CUDAGraph": SimulatedGraph,
        "graph": capture,
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    }

    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    for name, value in random.items():
        setattr(torch.cuda.random, name, value)


def _check_error(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code} at {place()}")


def _install_host() -> None:
    """Pinned memory, and what reads tensors without an operator."""
    tensor = torch.Tensor
    real_tensor = torch.tensor
    real_empty = torch.empty
    torch.utils._device._device_constructors()  # keeps a set of functions, torch.tensor among them

    def pin_memory(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return self if is_pinned(self) else DEVICE.host.pin(self.clone())

    def is_pinned(self: torch.Tensor, *arguments: Any) -> bool:
        return not isinstance(self, SimulatedTensor) and DEVICE.host.is_pinned(self)

    def checked(name: str) -> Any:
        real = getattr(tensor, name)

        @functools.wraps(real)
        def read(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if not DEVICE.host.is_quiet:
                DEVICE.host.check(self, is_written=False)
            return real(self, *arguments, **options)

        return read

    def tensor_of(data: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        # torch asks each tensor of a list for its number in C++, where nothing sees it.
        return real_tensor(_numbers(data), *arguments, **options)

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = real_empty(*size, **options)
        return DEVICE.host.pin(made) if pin_memory else made

    tensor.pin_memory = pin_memory  # type: ignore[method-assign]
    tensor.is_pinned = is_pinned  # type: ignore[method-assign]
    tensor.numpy = checked("numpy")  # type: ignore[method-assign]
    tensor.tolist = checked("tolist")  # type: ignore[method-assign]
    torch.tensor = tensor_of
    torch.empty = empty


def _numbers(data: Any) -> Any:
    """Lists of any depth, whose tensors of the device become numbers."""
    if isinstance(data, list | tuple):
        return [_numbers(item) for item in data]
    return data.item() if isinstance(data, SimulatedTensor) and data.dim() == 0 else data


def _install_modules() -> None:
    """`torch.compile` leaves functions as they are; parameters keep their marks when they move."""
    torch.compile = _not_compiled  # type: ignore[assignment]
    apply = torch.nn.Module._apply

    def keep_marks(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        before = {k: dict(p.__dict__) for k, p in self._parameters.items() if p is not None}
        result = apply(self, fn, recurse)
        for key, marks in before.items():
            for mark, value in marks.items():
                if mark not in ("inner", "_is_param"):
                    setattr(self._parameters[key], mark, value)
        return result

    torch.nn.Module._apply = keep_marks  # type: ignore[method-assign]


def _not_compiled(function: Any = None, **options: Any) -> Any:
    if function is None:
        return _not_compiled

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        DEVICE.compiled[getattr(function, "__qualname__", str(function))] += 1
        return function(*arguments, **more)

    return call
