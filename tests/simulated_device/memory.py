"""The memory of a simulated device as torch's caching allocator sees it, without fragmentation.

A tensor's storage takes a multiple of 512 bytes. Memory that was freed stays reserved until
`empty_cache`. It does not know what the tensors are.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

BLOCK = 512
DEVICE_BYTES = int(os.environ.get("SIMULATED_DEVICE_BYTES", 256 << 20))


class Memory:
    """What is allocated and reserved, and the most that was, since `reset_peak` and by phase."""

    def __init__(self, total: int = DEVICE_BYTES) -> None:
        self.total = total
        self.allocated = 0
        self.reserved = 0
        self.peak = 0
        self.phase_peaks: dict[str, int] = {}
        self._open: list[str] = []
        self._live: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Bytes that are not reserved."""
        return self.total - self.reserved

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed; a second call for the same one does nothing.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory.
        """
        key = storage._cdata
        if key in self._live:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if self.allocated + size > self.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes: {self.allocated} of "
                f"{self.total} are allocated"
            )
        self._live[key] = size
        weakref.finalize(storage, self._free, key).atexit = False

        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)
        for name in self._open:
            self.phase_peaks[name] = max(self.phase_peaks[name], self.allocated)

    def empty_cache(self) -> None:
        """Return what is reserved and not allocated."""
        self.reserved = self.allocated

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.peak = self.allocated

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Keep the peak of the body under `name`."""
        self._open.append(name)
        self.phase_peaks[name] = max(self.phase_peaks.get(name, 0), self.allocated)
        try:
            yield
        finally:
            self._open.remove(name)

    def _free(self, key: int) -> None:
        self.allocated -= self._live.pop(key)
