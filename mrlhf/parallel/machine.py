"""Memory that the ranks of one machine share, so that large tables lie in it once and not once a
rank.

The memory has no name in any file system: it is open in the ranks alone, so a job that is killed
leaves nothing behind, and the size of `/dev/shm` does not limit it. It is freed as soon as no rank
refers to it. Where ranks cannot share memory, each has a copy, and nothing else changes.

This file knows no batch. The groups of ranks come from `groups`.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import platform
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import MrlhfError, UserTraceback
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.parallel.pickled import Pickled, pickle_value, unpickle_value

logger = logging.getLogger(__name__)

T = TypeVar("T")


def name_of_this_machine() -> str:
    """A name that two processes have in common if they can open each other's files.

    They cannot in two containers of one machine, so it tells these apart too.
    """
    parts = [platform.node()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # it is not Linux
        parts.append(f"process {os.getpid()}")
    return " ".join(parts)


class Machine:
    """The ranks of one machine, and what they hold in common.

    All ranks of the job call its methods together, each on its own machine.
    """

    def __init__(
        self, ranks: dist.ProcessGroup, leaders: dist.ProcessGroup | None, machines: int
    ) -> None:
        """Share nothing yet.

        Args:
            ranks: the ranks of this machine; the first one leads.
            leaders: the leaders of all machines, on these ranks; elsewhere None.
            machines: how many machines there are.
        """
        self._ranks = ranks
        self._leaders = leaders
        self._machines = machines
        self._leader = dist.get_process_group_ranks(ranks)[0]
        self._can_share = True

    @property
    def is_leader(self) -> bool:
        """Whether this is the rank that does what is done once a machine."""
        return dist.get_rank() == self._leader

    def table(self, shape: Sequence[int], dtype: torch.dtype) -> OpenTable:
        """A table of zeros in which every rank of the job writes entries of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._share(nbytes) if nbytes and self._ranks.size() > 1 else None
        if memory is None:
            entries = torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        else:
            entries = memory.view(dtype).view(tuple(shape))
        return OpenTable(self, entries, is_shared=memory is not None)

    def once(self, compute: Callable[[], T], known: Sequence[object] = ()) -> T:
        """What `compute` returns, on every rank, although it is called once a machine.

        The tensors in the result are shared, so nobody may write to them. Everything else is
        copied, so it should be small.

        Args:
            compute: takes part in no collective. It must give the same on every machine.
            known: objects that the result may refer to and that each rank has: they are not copied.

        Raises:
            Exception: what `compute` raised, on every rank.
        """
        if self._ranks.size() == 1:
            return compute()

        outcome: list[Pickled | _Failure | None] = [None]
        failure: Exception | None = None
        tensors: list[Tensor] = []
        if self.is_leader:
            try:
                outcome[0], tensors = pickle_value(compute(), known)
            except Exception as error:  # the other ranks wait for it
                failure = error
                outcome[0] = _Failure.of(error)
        dist.broadcast_object_list(outcome, src=self._leader, group=self._ranks)

        if failure is not None:
            raise failure
        received = outcome[0]
        assert received is not None
        if isinstance(received, _Failure):
            raise received.error from received.cause

        table = self.table((received.nbytes,), torch.uint8)
        for place, tensor in zip(received.places, tensors, strict=False):  # of the leader alone
            place.within(table.entries).copy_(tensor.detach())
        tensors.clear()
        self._complete_here(table.entries, table.is_shared)
        value: T = unpickle_value(received, table.entries, known)
        return value

    def complete(self, entries: Tensor, is_shared: bool) -> None:
        """Bring together what all ranks of all machines have written; see `OpenTable.complete`."""
        self._complete_here(entries, is_shared)
        if self._machines == 1:
            return

        if self._leaders is not None:
            dist.all_reduce(_summable(entries), group=self._leaders)
        if is_shared:
            self._wait()
        elif self._ranks.size() > 1:
            dist.broadcast(_summable(entries), src=self._leader, group=self._ranks)

    def _complete_here(self, entries: Tensor, is_shared: bool) -> None:
        """Bring together what the ranks of this machine have written."""
        if is_shared:
            self._wait()
        elif self._ranks.size() > 1 and entries.numel():
            dist.all_reduce(_summable(entries), group=self._ranks)

    def _wait(self) -> None:
        """Wait for all ranks of the machine; a tensor of the host, so that a GPU has no part."""
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=self._ranks)

    def _share(self, nbytes: int) -> Tensor | None:
        """New memory of all ranks of the machine, uint8 [nbytes]; None if they cannot share any."""
        if not self._can_share:
            return None
        file = _AnonymousFile.make(nbytes) if self.is_leader else None
        offer = [file]
        dist.broadcast_object_list(offer, src=self._leader, group=self._ranks)
        assert offer[0] is not None

        memory, problem = offer[0].mapped(nbytes)
        has_everyone = torch.tensor(memory is not None, dtype=torch.int32, device="cpu")
        dist.all_reduce(has_everyone, dist.ReduceOp.MIN, group=self._ranks)
        if file is not None:
            file.close()
        if has_everyone:
            return memory

        self._can_share = False
        problems = all_gather_objects(problem, self._ranks)
        if self.is_leader:
            logger.warning(
                "the %d ranks of this machine cannot share memory (%s), so each keeps a copy of "
                "the batch; on Linux, start them in one container and as one user",
                self._ranks.size(),
                next(filter(None, problems)),
            )
        return None


@dataclass(frozen=True)
class OpenTable:
    """A table that ranks are filling.

    Attributes:
        machine: the ranks that see it.
        entries: zero where nobody has written. A rank writes its own entries and reads no others.
        is_shared: whether the ranks of the machine have one table together.
    """

    machine: Machine
    entries: Tensor
    is_shared: bool

    def complete(self) -> Tensor:
        """The table with the entries of all ranks of all machines; every rank calls it once.

        No two ranks may have written to the same entry. From now on nobody may write to it.
        """
        self.machine.complete(self.entries, self.is_shared)
        return self.entries


@dataclass(frozen=True)
class _Failure:
    """Why there is no result, as the ranks are told that did not compute it."""

    error: Exception
    cause: BaseException | None

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, MrlhfError):
            cause = error.__cause__ if isinstance(error.__cause__, UserTraceback) else None
            return _Failure(_class_of_ours(error)(str(error)), cause)
        told = RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
        return _Failure(told, UserTraceback(traceback.format_exc()))


def _class_of_ours(error: MrlhfError) -> type[MrlhfError]:
    """The error's class, or ours from which it is derived, since every rank can unpickle that."""
    ours = MrlhfError.__module__
    return next(kind for kind in type(error).__mro__ if kind.__module__ == ours)


@dataclass(frozen=True)
class _AnonymousFile:
    """A file in memory that is in no file system, as its maker offers it to others.

    Attributes:
        process: the maker's number.
        descriptor: the maker's; None if there is no file.
        link: what Linux says that the descriptor leads to. No other file in the world has it.
        problem: why there is no file.
    """

    process: int
    descriptor: int | None
    link: str
    problem: str

    @staticmethod
    def make(nbytes: int) -> _AnonymousFile:
        """A file of `nbytes` zeros, whose pages are taken as they are written to."""
        process = os.getpid()
        if not hasattr(os, "memfd_create"):
            return _AnonymousFile(process, None, "", "this system has no memfd_create")

        name = f"mrlhf-{uuid4().hex}"
        try:
            descriptor = os.memfd_create(name)
            try:
                os.ftruncate(descriptor, nbytes)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            return _AnonymousFile(process, None, "", str(error))
        return _AnonymousFile(process, descriptor, f"/memfd:{name} (deleted)", "")

    def mapped(self, nbytes: int) -> tuple[Tensor | None, str]:
        """Its memory, uint8 [nbytes], which lives as long as the tensor; or why there is none.

        On another machine of the same name, such as a copy of a virtual one, the maker's number may
        be that of a stranger, whose file is left alone.
        """
        if self.descriptor is None:
            return None, self.problem
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        try:
            link = os.readlink(path)
            if link != self.link:
                return None, f"{path} is another file: {link}"
            file = os.open(path, os.O_RDWR)
            try:
                return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8), ""
            finally:
                os.close(file)
        except OSError as error:
            return None, str(error)

    def close(self) -> None:
        """Let the memory live only as long as it is mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def _summable(entries: Tensor) -> Tensor:
    """The entries as numbers that can be summed: gloo sums no truth values and no int16.

    Only one rank writes to an entry, so the sum of its bytes is the entry.
    """
    return entries.view(torch.uint8) if entries.dtype in (torch.bool, torch.int16) else entries
