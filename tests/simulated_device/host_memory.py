"""Pinned host memory, and host memory whose copy from or to the device is not done yet.

A copy that does not block may still run when the call returns. On a GPU it is wrong to read its
target, or to write to its source, before the host has waited for it; here it raises. It does not
know streams: waiting for anything later than the copy is enough.
"""

from __future__ import annotations

import weakref

from torch import Tensor

_ALREADY_REGISTERED = 712
_NOT_REGISTERED = 713


class HostMemory:
    """Which storages of the host are pinned, and which are still read or written by the device."""

    def __init__(self) -> None:
        self.now = 0
        self._done = 0
        self._pinned: set[int] = set()
        self.registered: dict[int, int] = {}  # bytes by address, of memory that is not torch's
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}

    def pin(self, tensor: Tensor) -> Tensor:
        """Make the memory of a host tensor pinned."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pinned:
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._forget, storage._cdata).atexit = False
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the memory of a host tensor is pinned."""
        storage = tensor.untyped_storage()
        return storage._cdata in self._pinned or storage.data_ptr() in self.registered

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """Pin memory that is not torch's; a code of CUDA."""
        if address in self.registered:
            return _ALREADY_REGISTERED
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        """Let memory go that was registered; a code of CUDA."""
        return _NOT_REGISTERED if self.registered.pop(address, None) is None else 0

    def begin_write(self, tensor: Tensor) -> None:
        """The device begins to write to a pinned tensor."""
        self.now += 1
        self._written[tensor.untyped_storage()._cdata] = self.now

    def begin_read(self, tensor: Tensor) -> None:
        """The device begins to read a pinned tensor."""
        self.now += 1
        self._read[tensor.untyped_storage()._cdata] = self.now

    def wait(self, until: int | None = None) -> None:
        """The host has waited for all copies, or for those before the moment `until`."""
        self._done = max(self._done, self.now if until is None else until)
        if self._done >= self.now:
            self._written.clear()
            self._read.clear()

    @property
    def is_quiet(self) -> bool:
        """Whether no copy is under way."""
        return not self._written and not self._read

    def check(self, tensor: Tensor, is_written: bool) -> None:
        """Refuse a tensor that the device still writes, or that it still reads if `is_written`."""
        key = tensor.untyped_storage()._cdata
        if self._written.get(key, 0) > self._done:
            raise RuntimeError("a host tensor is used before its copy from the device is done")
        if is_written and self._read.get(key, 0) > self._done:
            raise RuntimeError("a host tensor is changed before its copy to the device is done")

    def _forget(self, key: int) -> None:
        self._pinned.discard(key)
        self._written.pop(key, None)
        self._read.pop(key, None)
