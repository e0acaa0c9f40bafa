"""Moves the memory of one model between the device and the host, where it waits until needed.

A model's memory has three owners: `params`, `grads`, and `optimizer` (moments and float32 main
weights). Whoever needs some of them says so for as long as that lasts. The others leave the device
if the configuration offloads them. Optimizer states may also be streamed: they are never on the
device together, but pass through it in parts.

Storages are emptied and filled again, so that every view of them, such as a parameter in a bucket,
stays valid; only its address changes. This file does not know models, nor what they are needed for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mrlhf.errors import TrainingError
from mrlhf.parallel.device_memory import DeviceMemory
from mrlhf.parallel.host_block import host_tensors
from mrlhf.printable import size_text

Owner = Literal["params", "grads", "optimizer"]
Stream = Literal["host", "disk"]
STREAMED_BYTES = 256 << 20  # of main weights and moments that pass through the device together
_STREAMED: Owner = "optimizer"


class _OnDevice(NamedTuple):
    """A storage on the device, by one of the tensors that are views of it."""

    tensor: Tensor
    is_constant: bool  # whether nobody changes its values


class _Away(NamedTuple):
    """A storage that is not on the device; its tensors are empty, but keep their shapes."""

    tensor: Tensor
    nbytes: int
    copy: Tensor | None  # its values on the host; None: they are not needed


class Residency:
    """Moves the memory of one model on one rank."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[Owner, Callable[[], list[Tensor]]],
        offload: Collection[Owner],
        memory: DeviceMemory,
        before_leaving: Callable[[], None],
        stream: Stream | None = None,
    ) -> None:
        """Take what is on the device now; nothing leaves before `leave`, or before it was needed.

        Args:
            name: of the model, for `memory`.
            tensors: by owner, all its tensors on the device, whenever it is called. A storage that
                several owners have is that of the first.
            offload: the owners that leave.
            memory: is told what is on the device.
            before_leaving: waits until nobody else reads or writes the tensors.
            stream: where optimizer states are that are streamed; None: they are not.
        """
        self._name = name
        self._tensors: dict[Owner, Callable[[], list[Tensor]]] = {}
        self._streams_from = stream
        self._offload = set(offload) | ({_STREAMED} if stream is not None else set())
        self._memory = memory
        self._before_leaving = before_leaving
        self._needed: dict[Owner, int] = {}
        # By owner and storage. Copies are kept for the next time: pinned memory takes long to get.
        self._away: dict[Owner, dict[int, _Away]] = {}
        self._copies: dict[Owner, dict[int, Tensor]] = {}
        self._room: dict[int, Tensor] = {}  # by storage, memory for copies that are not made yet
        self._old: set[Owner] = set()  # owners of which no copy is current
        for owner, of_owner in tensors.items():
            self.add(owner, of_owner)

    def add(self, owner: Owner, tensors: Callable[[], list[Tensor]]) -> None:
        """Take an owner that has come later; its tensors are on the device now."""
        self._tensors[owner] = tensors
        self._needed[owner] = 0
        self._copies[owner] = {}
        self._count(owner)

    @property
    def nbytes(self) -> dict[Owner, int]:
        """The bytes of each owner, wherever they are."""
        return {
            owner: sum(self._nbytes(owner)) + sum(away.nbytes for away in self._away_of(owner))
            for owner in self._tensors
        }

    @contextmanager
    def needing(self, *owners: Owner) -> Iterator[None]:
        """Have these owners on the device for as long as this lasts; it may be nested.

        Owners that the model does not have, or that are streamed, are left out.

        Raises:
            MemoryBoundError: they do not fit.
        """
        known = [owner for owner in owners if owner in self._tensors and not self.streams(owner)]
        for owner in known:
            self._come(owner)
            self._needed[owner] += 1
        try:
            yield
        finally:
            for owner in known:
                self._needed[owner] -= 1
            if not any(self._needed.values()):
                for owner in known:
                    self._count(owner)  # the first step has made moments
            self.leave()

    def streams(self, owner: Owner = _STREAMED) -> bool:
        """Whether an owner is streamed."""
        return owner == _STREAMED and self._streams_from is not None

    @contextmanager
    def passing(self, tensors: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Have tensors of a streamed owner on the device for as long as this lasts.

        `tensors` is called again at the end, since there may be more of them then.
        """
        away = self._away[_STREAMED]
        coming = {_key(tensor) for tensor in tensors()} & away.keys()
        title = self._title(_STREAMED)
        self._memory.hold(title, sum(away[key].nbytes for key in coming))
        for key in coming:
            _fetch(away.pop(key))
        yield
        own = {_key(tensor): tensor for tensor in tensors()}
        for key in map(_key, self._tensors["params"]()):
            own.pop(key, None)
        self._memory.hold(title, sum(_size(tensor) for tensor in own.values()))
        self._send(_STREAMED, {key: _OnDevice(t, is_constant=False) for key, t in own.items()})
        self._memory.hold(title, 0)

    def values(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor, flat, where they are until it comes back or leaves."""
        key = _key(tensor)
        for away in self._away.values():
            if key in away:
                copy = away[key].copy
                assert copy is not None, "gradients that are away have no values"
                if tensor.is_cuda:
                    torch.cuda.current_stream(tensor.device).synchronize()
                begin = tensor.storage_offset()
                return copy[begin : begin + tensor.numel()]
        return tensor.detach().view(-1)

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
        self._copies.clear()

    def forget_copies(self) -> None:
        """Copy frozen weights again when they leave next, since they have changed."""
        self._old.update(self._tensors)

    def _leave(self, owner: Owner) -> None:
        self._before_leaving()
        storages = self._storages(owner)
        self._away[owner] = {}
        copies = self._copies[owner]
        self._copies[owner] = {key: copy for key, copy in copies.items() if key in storages}
        self._send(owner, storages)
        self._old.discard(owner)
        self._memory.hold(self._title(owner), 0)

    def _send(self, owner: Owner, storages: Mapping[int, _OnDevice]) -> None:
        if owner != "grads":
            self._make_room(owner, storages)
        for key, held in storages.items():
            copy = None if owner == "grads" else self._copied(owner, key, held)
            away = _Away(held.tensor, _size(held.tensor), copy)
            held.tensor.untyped_storage().resize_(0)
            self._away[owner][key] = away

    def _make_room(self, owner: Owner, storages: Mapping[int, _OnDevice]) -> None:
        """Take memory of the host for the storages that have no copy of their size there."""
        wholes = {key: _whole(held.tensor) for key, held in storages.items()}
        copies = self._copies[owner]
        for key in copies.keys() & wholes.keys():
            if (copies[key].shape, copies[key].dtype) == (wholes[key].shape, wholes[key].dtype):
                del wholes[key]
        if self.streams(owner) and self._streams_from == "disk":
            made = [_on_disk(whole) for whole in wholes.values()]
        else:
            sizes = [(len(whole), whole.dtype) for whole in wholes.values()]
            made = host_tensors(sizes, pinned=any(whole.is_cuda for whole in wholes.values()))
        self._room = dict(zip(wholes, made, strict=True))

    def _come(self, owner: Owner) -> None:
        if owner not in self._away:
            return
        away = self._away_of(owner)
        self._memory.hold(self._title(owner), sum(storage.nbytes for storage in away))
        del self._away[owner]
        for storage in away:
            _fetch(storage)

    def _copied(self, owner: Owner, key: int, held: _OnDevice) -> Tensor:
        """A storage's values on the host; on a GPU they arrive when its queue comes to that."""
        copies = self._copies[owner]
        if key in self._room:
            copies[key] = self._room.pop(key)
        elif held.is_constant and owner not in self._old:
            return copies[key]
        return copies[key].copy_(_whole(held.tensor), non_blocking=copies[key].is_pinned())

    def _count(self, owner: Owner) -> None:
        self._memory.hold(self._title(owner), sum(self._nbytes(owner)))

    def _title(self, owner: Owner) -> str:
        return f"{self._name}/{owner}"

    def _nbytes(self, owner: Owner) -> Iterator[int]:
        """The bytes of each storage of an owner that is on the device."""
        if owner not in self._away:
            yield from (_size(held.tensor) for held in self._storages(owner).values())

    def _away_of(self, owner: Owner) -> list[_Away]:
        return list(self._away.get(owner, {}).values())

    def _storages(self, owner: Owner) -> dict[int, _OnDevice]:
        """The storages of an owner, and of no owner before it."""
        earlier: set[int] = set()
        is_frozen = "grads" not in self._tensors
        for name, tensors in self._tensors.items():
            found: dict[int, _OnDevice] = {}
            for tensor in tensors():
                key = _key(tensor)
                constant = owner == "params" and (is_frozen or not tensor.requires_grad)
                constant = constant and (key not in found or found[key].is_constant)
                found[key] = _OnDevice(tensor, constant)
            if name == owner:
                return {key: held for key, held in found.items() if key not in earlier}
            earlier |= found.keys()
        raise AssertionError(f"no owner {owner}")


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _whole(tensor: Tensor) -> Tensor:
    """All elements of the storage that a tensor is a view of, flat."""
    return tensor.detach().as_strided((_size(tensor) // tensor.dtype.itemsize,), (1,), 0)


def _fetch(away: _Away) -> None:
    away.tensor.untyped_storage().resize_(away.nbytes)
    if away.copy is not None:
        _whole(away.tensor).copy_(away.copy, non_blocking=away.copy.is_pinned())


def _on_disk(whole: Tensor) -> Tensor:
    """Memory that is a temporary file without a name; TrainingError if there is no room."""
    with tempfile.NamedTemporaryFile(prefix="mrlhf-states-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, whole.nbytes)  # else a full disk kills the rank
        except OSError as error:
            raise TrainingError(
                f"optim.stream disk: {tempfile.gettempdir()} has no room for "
                f"{size_text(whole.nbytes)} of optimizer states ({error.strerror}); set TMPDIR to "
                "a directory that has, or optim.stream to host"
            ) from error
        return torch.from_file(file.name, shared=True, size=len(whole), dtype=whole.dtype)
