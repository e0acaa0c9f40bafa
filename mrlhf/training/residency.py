"""What of one model is on the device, and what waits on the host until it is needed.

A model's memory has three owners: `params`, `grads`, and `optimizer` (moments and float32 main
weights). Whoever needs some of them says so for as long as that lasts. The others leave the device
if the configuration offloads them. Storages are emptied and filled again, so that every view of
them, such as a parameter in a bucket, stays valid; only its address changes.

This file does not know models, nor what they are needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mrlhf.parallel.device_memory import DeviceMemory

Owner = Literal["params", "grads", "optimizer"]


class _Held(NamedTuple):
    """A storage on the device, by one of the tensors that are views of it."""

    tensor: Tensor
    is_constant: bool  # whether nobody changes its values


class _Away(NamedTuple):
    """A storage that is not on the device; its tensors are empty, but keep their shapes."""

    tensor: Tensor
    nbytes: int
    copy: Tensor | None  # its bytes on the host; None: they have no value


class Residency:
    """Moves the memory of one model on one rank."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[Owner, Callable[[], list[Tensor]]],
        offload: Collection[Owner],
        memory: DeviceMemory,
        before_leaving: Callable[[], None],
    ) -> None:
        """Take what is on the device now; nothing leaves before `leave`, or before it was needed.

        Args:
            name: of the model, for `memory`.
            tensors: by owner, all its tensors on the device, whenever it is called. A storage that
                several owners have is that of the first.
            offload: the owners that leave.
            memory: is told what is on the device.
            before_leaving: waits until nobody else reads or writes the tensors.
        """
        self._name = name
        self._tensors = dict(tensors)
        self._offload = set(offload) & self._tensors.keys()
        self._memory = memory
        self._before_leaving = before_leaving
        self._needed: dict[Owner, int] = dict.fromkeys(self._tensors, 0)
        self._away: dict[Owner, list[_Away]] = {}
        # By owner, and number of its storage. Pinned memory takes long to get, so it is kept.
        self._copies: dict[tuple[Owner, int], Tensor] = {}
        self._count()

    @property
    def nbytes(self) -> dict[Owner, int]:
        """The bytes of each owner, wherever they are."""
        return {owner: self._nbytes(owner) for owner in self._tensors}

    @contextmanager
    def needing(self, *owners: Owner) -> Iterator[None]:
        """Have these owners on the device for as long as this lasts; it may be nested.

        Owners that the model does not have are left out.

        Raises:
            MemoryBoundError: they do not fit.
        """
        known = [owner for owner in owners if owner in self._tensors]
        for owner in known:
            self._come(owner)
            self._needed[owner] += 1
        try:
            yield
        finally:
            for owner in known:
                self._needed[owner] -= 1
            if not any(self._needed.values()):
                self._count()  # the first step has made moments
            self.leave()

    def leave(self) -> None:
        """Let all that is offloaded, and not needed now, leave the device."""
        for owner in self._tensors:
            if owner in self._offload and not self._needed[owner] and owner not in self._away:
                self._leave(owner)

    def close(self) -> None:
        """Have everything on the device again, and forget it."""
        for owner in self._tensors:
            self._come(owner)
            self._memory.hold(self._title(owner), 0)
        self._tensors.clear()

    def forget_copies(self) -> None:
        """Copy frozen weights again when they leave next, since they have changed."""
        self._copies.clear()

    def _leave(self, owner: Owner) -> None:
        self._before_leaving()
        self._away[owner] = []
        for number, held in enumerate(self._storages(owner)):
            storage = held.tensor.untyped_storage()
            nbytes = storage.nbytes()
            copy = None if owner == "grads" else self._copied((owner, number), held)
            storage.resize_(0)
            self._away[owner].append(_Away(held.tensor, nbytes, copy))
        self._memory.hold(self._title(owner), 0)

    def _come(self, owner: Owner) -> None:
        if owner not in self._away:
            return
        self._memory.hold(self._title(owner), self._nbytes(owner))
        for tensor, nbytes, copy in self._away.pop(owner):
            tensor.untyped_storage().resize_(nbytes)
            if copy is not None:
                _whole(tensor).copy_(copy, non_blocking=True)

    def _count(self) -> None:
        for owner in self._tensors.keys() - self._away.keys():
            self._memory.hold(self._title(owner), self._nbytes(owner))

    def _title(self, owner: Owner) -> str:
        return f"{self._name}/{owner}"

    def _nbytes(self, owner: Owner) -> int:
        if owner in self._away:
            return sum(away.nbytes for away in self._away[owner])
        return sum(held.tensor.untyped_storage().nbytes() for held in self._storages(owner))

    def _copied(self, place: tuple[Owner, int], held: _Held) -> Tensor:
        """A storage's values on the host; on a GPU they arrive when its queue comes to that."""
        whole = _whole(held.tensor)
        copy = self._copies.get(place)
        if copy is None or copy.shape != whole.shape or copy.dtype != whole.dtype:
            copy = torch.empty(len(whole), dtype=whole.dtype, pin_memory=whole.is_cuda)
        elif held.is_constant:
            return copy
        self._copies[place] = copy
        return copy.copy_(whole, non_blocking=True)

    def _storages(self, owner: Owner) -> list[_Held]:
        """The storages of an owner, and of no owner before it, each once."""
        earlier: set[int] = set()
        for name, tensors in self._tensors.items():
            found: dict[int, _Held] = {}
            for tensor in tensors():
                storage = tensor.untyped_storage()
                constant = owner == "params" and not tensor.requires_grad
                known = found.get(storage._cdata)
                constant = constant and (known is None or known.is_constant)
                found[storage._cdata] = _Held(tensor, constant)
            if name == owner:
                return [held for key, held in found.items() if key not in earlier]
            earlier |= found.keys()
        raise AssertionError(f"no owner {owner}")


def _whole(tensor: Tensor) -> Tensor:
    """All elements of the storage that a tensor is a view of, flat."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)
