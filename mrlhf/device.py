"""Chooses the device of a rank; this file knows neither models nor layouts nor other ranks.

If there is no GPU, importing it sets what torch reads of the environment, so it must come before
torch's first tensor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import random
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mrlhf.errors import ConfigError
from mrlhf.nvidia import driver_version, fault_of_torch

Kind = Literal["cpu", "cuda"]
_log = logging.getLogger(__name__)

# Dense TFLOP/s of matrix products in bfloat16 (tensor cores, sums in float32) and in float32 (no
# TF32), by the name that `torch.cuda.get_device_name` gives. If two names match, the longer one
# must come first. The figures are from NVIDIA's data sheet of each card, and for GeForce cards from
# the Ampere GA102, Ada and RTX Blackwell whitepapers. If only figures "with sparsity" are printed,
# half of them is used.
_PEAK_TFLOPS = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "GH200": (989.4, 66.9),
    "H200 NVL": (835.5, 60.0),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.5, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10": (125.0, 31.2),
    "L40S": (362.05, 91.6),
    "L40": (181.05, 90.5),
    "L4": (121.0, 30.3),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}
# Parameters of glibc's `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_VARIABLES_OF_TORCH = {
    # A page that the system hands out is cleared first; large pages cost less for each byte.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Products in bfloat16 keep a compiled kernel for each shape, and packs have ever new lengths.
    # Both caches would hold 1,024 kernels, about 1 GB. With 128 the kernels of some forty lengths
    # that come again would be compiled each time, which costs a small model a third of a step.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
    "LRU_CACHE_CAPACITY": "512",
}
_MALLOC_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}

_OTHER_CARD = re.compile(r"MIG|Laptop|Max-Q|RTX 5090 D|RTX 4090 D|RTX 3090 Ti")


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor`, which is on the host, on `device`; the host does not wait for the copy."""
    if device.type == "cpu":
        return tensor
    # A copy from other than pinned memory would wait for all work of the GPU.
    return tensor.pin_memory().to(device, non_blocking=True)


class Moment:
    """The present moment in the work of a device, which the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def since(self, earlier: Moment) -> float:
        """Seconds since an earlier moment; waits until the device has come to this one."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        if not self._event.query():
            self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


Span = tuple[Moment, Moment]


def seconds_in(spans: Sequence[Span]) -> float:
    """The seconds of all spans together."""
    return sum(end.since(begin) for begin, end in spans)


class Fetch:
    """Copies of tensors of one device on their way to the host, which does not wait yet."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._found = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event = torch.cuda.Event() if tensors[0].is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """Return the copies when they are there; later work of the device may still run."""
        if self._event is not None:
            self._event.synchronize()
        return self._found


@dataclass(frozen=True)
class Device:
    """Where tensors live; a GPU's `torch_device` includes the index."""

    kind: Kind
    torch_device: torch.device

    def synchronize(self) -> None:
        """Wait for all work queued on the device, so that a clock can be read."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def max_memory_allocated(self) -> int:
        """Peak bytes so far: of tensors on a GPU, of resident memory on a CPU."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def peak_tflops(self, dtype: torch.dtype) -> float | None:
        """The result of the function `peak_tflops` for this device; None on a CPU."""
        if self.kind == "cpu":
            return None
        return peak_tflops(torch.cuda.get_device_name(self.torch_device), dtype)

    def describe(self) -> dict[str, Any]:
        """The host, the device, the threads of this process and the version of torch, in words."""
        if self.kind == "cuda":
            device = torch.cuda.get_device_name(self.torch_device)
        else:
            device = _processor()
        return {
            "host": platform.node(),
            "device": device,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        }


def peak_tflops(name: str, dtype: torch.dtype) -> float | None:
    """Dense peak of matrix products on one GPU, in 10^12 operations a second.

    It is None if this file does not know the card (or the MIG slice of a card) or the dtype. `name`
    is the one that `torch.cuda.get_device_name` gives.
    """
    column = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 1}
    if dtype not in column or _OTHER_CARD.search(name):
        return None

    for card, peak in _PEAK_TFLOPS.items():
        if re.search(rf"\b{card}\b", name):
            return peak[column[dtype]]
    return None


def pick_device(setting: Literal["auto", "cpu", "cuda"], local_rank: int) -> Device:
    """Choose the device of one process; "auto" takes a GPU if there is one.

    On a CPU the process then keeps the memory that it frees.

    Raises:
        ConfigError: there is no GPU, or there are too few, or this machine has one that torch does
            not see, or the CPU is asked for and a GPU is visible.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("distributed.device is cuda but torch sees no GPU; set it to auto or cpu")
    hides = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    fault = fault_of_torch(torch.version.cuda, driver_version(), available)
    if setting == "auto" and not available and fault is not None and not hides:
        found = f"distributed.device is auto, and torch {'; '.join(fault)}"
        if torch.version.cuda is not None:
            raise ConfigError(f"{found}; distributed.device=cpu computes on CPUs")
        if local_rank == 0:  # a build for CPUs may be there on purpose
            _log.warning("this run computes on CPUs, much more slowly: %s", found)
    if setting == "cpu" and available:
        raise ConfigError(
            "distributed.device is cpu but torch sees a GPU; hide it with CUDA_VISIBLE_DEVICES=''"
        )

    if not available:
        _keep_freed_memory()
        return Device("cpu", torch.device("cpu"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: torch sees "
            f"{torch.cuda.device_count()}; start at most that many processes on each machine"
        )
    torch.cuda.set_device(local_rank)
    return Device("cuda", torch.device("cuda", local_rank))


def _processor() -> str:
    """The name of the machine's processor, if the system gives it, and the number of its cores."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = named.group(1) if named else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _keep_freed_memory() -> None:
    """Let the process use freed memory again, instead of returning it to the system at once.

    A pass over a pack allocates and frees the same tensors for each layer. The system clears memory
    before it gives it out again, which takes up to a sixth of an update of a small model. On glibc,
    tensors of up to 32 MiB (its highest limit) then reuse memory. Nothing changes elsewhere, or if
    the user has set glibc's limits.
    """
    if _MALLOC_VARIABLES & os.environ.keys() or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, -1)


def dtype_on(setting: Literal["auto", "float32", "bfloat16"], kind: str) -> torch.dtype:
    """The dtype of parameters and activations; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if setting == "auto":
        return torch.bfloat16 if kind == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setting]


def device_kind(setting: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The kind of device that a setting means; this machine may lack it."""
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return setting


def cores() -> int:
    """The cores of this machine that the process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def host_memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_memory_mb() -> float | None:
    """The memory of the first GPU of this machine, in MiB; None if torch sees none."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / 2**20


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_variables_of_torch() -> None:
    """Set what torch and oneDNN read at their first use, if there is no GPU and it is not set."""
    if torch.cuda.is_available():
        return
    for name, value in _VARIABLES_OF_TORCH.items():
        os.environ.setdefault(name, value)


set_variables_of_torch()
