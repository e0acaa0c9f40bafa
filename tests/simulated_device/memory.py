"""The memory of a simulated device as torch's caching allocator sees it, without fragmentation.

A tensor's storage takes a multiple of 512 bytes. Memory that was freed stays reserved until
`empty_cache`; that of a pool is the pool's alone, and is given back at once, as when the pool goes
with its tensors. It does not know what the tensors are.
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
        self.in_pools = 0  # of what is allocated
        self._reserved = 0  # outside of pools
        self._pooling = False
        self._pooled: set[int] = set()
        self.peak = 0
        self.phase_peaks: dict[str, int] = {}
        self._open: list[str] = []
        self._live: dict[int, int] = {}
        self._by_address: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._addresses: dict[int, int] = {}

    @property
    def reserved(self) -> int:
        """Bytes that are not free."""
        return self._reserved + self.in_pools

    @contextmanager
    def pool(self) -> Iterator[None]:
        """Take memory from a pool in the body."""
        self._pooling = True
        try:
            yield
        finally:
            self._pooling = False

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
        self._take(storage, storage.nbytes())
        weakref.finalize(storage, self._free, key).atexit = False

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage other memory, which may be none.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory.
        """
        self._free(storage._cdata)
        storage.resize_(nbytes)
        self._take(storage, nbytes)

    def _take(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        size = -(-nbytes // BLOCK) * BLOCK
        if self.allocated + size > self.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes: {self.allocated} of "
                f"{self.total} are allocated"
            )
        self._live[key] = size
        if nbytes:
            self._addresses[key] = storage.data_ptr()
            self._by_address[self._addresses[key]] = weakref.ref(storage)

        self.allocated += size
        if self._pooling:
            self._pooled.add(key)
            self.in_pools += size
        self._reserved = max(self._reserved, self.allocated - self.in_pools)
        self.peak = max(self.peak, self.allocated)
        for name in self._open:
            self.phase_peaks[name] = max(self.phase_peaks[name], self.allocated)

    def has(self, address: int) -> bool:
        """Whether a storage of the device begins there."""
        return address in self._by_address

    def at(self, address: int) -> torch.UntypedStorage:
        """The storage that begins there."""
        found = self._by_address[address]() if self.has(address) else None
        if found is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return found

    def empty_cache(self) -> None:
        """Return what is reserved and not allocated."""
        self._reserved = self.allocated - self.in_pools

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
        self._by_address.pop(self._addresses.pop(key, 0), None)
        size = self._live.pop(key)
        self.allocated -= size
        if key in self._pooled:
            self._pooled.discard(key)
            self.in_pools -= size
