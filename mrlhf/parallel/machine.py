"""Memory that the ranks of a machine share, so that each large table is in memory only once.

The memory has no name in any file system: only the ranks have it open, so a job that is killed
leaves nothing behind, and the size of `/dev/shm` does not limit it. It is freed as soon as no rank
refers to it. Where ranks cannot share memory, each has a copy, and nothing else changes.

This file does not know what a batch is. The groups of ranks come from `groups`.
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
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import MrlhfError, UserTraceback
from mrlhf.parallel.collectives import all_gather_objects, wait_for_all
from mrlhf.parallel.pickled import extents_of, put_together, take_apart

logger = logging.getLogger(__name__)

T = TypeVar("T")


def name_of_this_machine() -> str:
    """A name that is equal in two processes if they can open each other's files."""
    parts = [platform.node()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # it is not Linux
        parts.append(f"process {os.getpid()}")
    return " ".join(parts)


class Machine:
    """The ranks of one machine, and the memory that they share.

    All ranks of the job call its methods together, each on its own machine.
    """

    def __init__(
        self, ranks: dist.ProcessGroup, leaders: dist.ProcessGroup | None, machines: int
    ) -> None:
        """Share nothing yet.

        The first of `ranks` leads. `leaders` are those of all machines; None on other ranks.
        """
        self._ranks = ranks
        self._leaders = leaders
        self._machines = machines
        self._leader = dist.get_process_group_ranks(ranks)[0]
        self._can_share = True

    @property
    def is_leader(self) -> bool:
        """Whether this rank does the work that is done once a machine."""
        return dist.get_rank() == self._leader

    def table(self, shape: Sequence[int], dtype: torch.dtype) -> OpenTable:
        """A table of zeros in which every rank of the job writes its own entries."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._share(nbytes) if nbytes and self._ranks.size() > 1 else None
        if memory is None:
            entries = torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        else:
            entries = memory.view(dtype).view(tuple(shape))
        return OpenTable(self, entries, is_shared=memory is not None)

    def compute_on_leader(self, compute: Callable[[], T], shared: Sequence[object] = ()) -> T:
        """Call `compute` on one rank of each machine, and return its result on every rank.

        The tensors in the result are shared, so nobody may write to them. Everything else is
        copied, so it should be small.

        `compute` takes part in no collective, and gives the same on every machine. `shared` are
        objects that each rank has, to which the result may refer without a copy.

        Raises:
            Exception: the error that `compute` raised, on every rank.
        """
        if self._ranks.size() == 1:
            return compute()

        outcome: list[Any] = [None, None]  # the value and its tensors' places; a failure
        failure: Exception | None = None
        tensors: list[Tensor] = []
        if self.is_leader:
            try:
                pickled, tensors = take_apart(compute(), shared)
                outcome[0] = pickled, extents_of(tensors)
            except Exception as error:  # the other ranks wait for it
                failure = error
                outcome[1] = _for_other_ranks(error)
        wait_for_all(self._ranks)
        dist.broadcast_object_list(outcome, src=self._leader, group=self._ranks)

        if failure is not None:
            raise failure
        if outcome[1] is not None:
            error_of_leader, cause = outcome[1]
            raise error_of_leader from cause

        pickled, extents = outcome[0]
        table = self.table((extents[-1].end if extents else 0,), torch.uint8)
        for extent, tensor in zip(extents, tensors, strict=False):  # of the leader alone
            extent.within(table.entries).copy_(tensor.detach())
        self._complete_here(table.entries, table.is_shared)
        tensors = [extent.within(table.entries) for extent in extents]
        return put_together(pickled, shared, tensors)

    def complete(self, entries: Tensor, is_shared: bool) -> None:
        """Add up the entries that all ranks have written; see `OpenTable.complete`."""
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
        """Add up the entries that the ranks of this machine have written."""
        if is_shared:
            self._wait()
        elif self._ranks.size() > 1 and entries.numel():
            dist.all_reduce(_summable(entries), group=self._ranks)

    def _wait(self) -> None:
        """Wait for all ranks of the machine; the tensor is on the host, so no GPU takes part."""
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=self._ranks)

    def _share(self, nbytes: int) -> Tensor | None:
        """Memory that all ranks of the machine map, uint8 [nbytes]; None if they cannot share."""
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
    """A table that ranks are filling."""

    machine: Machine
    entries: Tensor  # zero where nobody has written; a rank writes its own and reads no others
    is_shared: bool  # whether the ranks of the machine have one table together

    def complete(self) -> Tensor:
        """The table with all ranks' entries, each written by one rank; every rank calls it once."""
        self.machine.complete(self.entries, self.is_shared)
        return self.entries


def _for_other_ranks(error: Exception) -> tuple[Exception, UserTraceback | None]:
    """The error and its cause in a form that a rank that did not compute can raise."""
    if isinstance(error, MrlhfError):
        # Every rank can unpickle the classes of `mrlhf.errors`.
        ours = MrlhfError.__module__
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == ours)
        cause = error.__cause__ if isinstance(error.__cause__, UserTraceback) else None
        return kind(str(error)), cause
    received = RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    return received, UserTraceback(traceback.format_exc())


@dataclass(frozen=True)
class _AnonymousFile:
    """A file in memory that is in no file system, as its maker describes it to other ranks."""

    process: int  # process id of the maker
    descriptor: int | None  # the maker's file descriptor; None if there is no file
    link: str  # the target of the descriptor's link in /proc, which no other file in the world has
    problem: str  # the reason why there is no file

    @staticmethod
    def make(nbytes: int) -> _AnonymousFile:
        """A file of `nbytes` zeros. It takes memory only as it is written to."""
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
        """The file's memory, uint8 [nbytes], kept while the tensor lives; or why there is none."""
        if self.descriptor is None:
            return None, self.problem

        path = f"/proc/{self.process}/fd/{self.descriptor}"
        try:
            # On another machine of the same name, such as a copy of a virtual one, the maker's
            # process id may be that of a stranger, whose file must be left alone.
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
        """Close the descriptor; the memory lives on as long as it is mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def _summable(entries: Tensor) -> Tensor:
    """The entries in a dtype that gloo can sum: it sums neither bool nor int16."""
    # Only one rank writes to an entry, so the sum of its bytes is the entry.
    return entries.view(torch.uint8) if entries.dtype in (torch.bool, torch.int16) else entries
