"""Carries moves between ranks of one machine through memory that they share.

Each rank packs what it sends into a small ring of parcels in POSIX shared memory, once for all
ranks that need it. They unpack it from there directly into their engines. Packing and unpacking
overlap, nothing is copied in between, and because a parcel fits into the cache of the processor,
the cost is little more than one copy of each number.

The file names of the memory are removed before the first weight moves, so a job that is killed
later leaves nothing behind. The ring is kept between runs: to allocate its pages again takes as
long as moving several times its size.

This file knows moves and views; it does not know how moves are planned, or engines.
"""

from __future__ import annotations

import io
import mmap
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.reshard.mailbox import Mailbox, Message
from mrlhf.reshard.moves import Move
from mrlhf.reshard.parcels import Parcel, parcels_of
from mrlhf.reshard.plan import ReshardPlan
from mrlhf.reshard.views import Views

DIRECTORY = Path("/dev/shm")
RING_BYTES = 8 << 20
RING_PARCELS = 4
_FILLED = 0
_READ = 1
_NO_MORE_WORK = object()


class Ring:
    """The parcels of one sending rank in shared memory.

    Parcel n has place n modulo `RING_PARCELS`.
    """

    def __init__(self, parcels: Sequence[Parcel], dtype: torch.dtype) -> None:
        self.parcels = parcels
        self._dtype = dtype
        self._stride = max((parcel.elements for parcel in parcels), default=0)
        self.nbytes = self._stride * min(RING_PARCELS, len(parcels)) * dtype.itemsize

    def open(self, path: Path, create: bool) -> None:
        """Map the file at `path`; the owner creates it.

        Raises:
            OSError: there is no such file on this machine, or no room for it.
        """
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        with io.FileIO(os.open(path, flags, 0o600), "r+") as file:
            if create:
                # Allocate the pages at once: if /dev/shm were full later, writing to the memory
                # would kill the process.
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
            numbers = torch.frombuffer(mmap.mmap(file.fileno(), self.nbytes), dtype=self._dtype)

        self._slices: list[list[Tensor]] = []
        for number, parcel in enumerate(self.parcels):
            place = number % RING_PARCELS * self._stride
            self._slices.append(
                [numbers[place + packed.offset :][: packed.elements] for packed in parcel.slices]
            )

    def slices(self, number: int) -> list[Tensor]:
        """The slices of parcel `number`, each as a flat tensor."""
        return self._slices[number]


class SharedRings:
    """The ring of this rank, the rings that it reads, and messages about what is filled and read.

    A rank leaves `carry` only after all others have read what it sent.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        bucket_bytes: int,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        """Every rank of the group constructs one, and then calls `open`.

        Args:
            plan: the plan of this rank.
            bucket_bytes: bound on the memory of a ring, unless a few rows of a tensor are larger.
            dtype: dtype of the numbers.
            timeout_s: seconds after which a rank that waits for another gives up.
        """
        self._rank = plan.rank
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._run = 0
        self._messages_of_next_run: list[Message] = []

        self._capacity = min(bucket_bytes, RING_BYTES) // RING_PARCELS // dtype.itemsize
        self._senders = sorted({move.source_rank for move in plan.receives})
        self._read_from: dict[int, Ring] = {}

        self._own: Ring | None = None
        if plan.sends:
            self._own = self._ring_of(plan.sends)
        self.peak_bytes = 0 if self._own is None else self._own.nbytes

    def open(
        self, group: dist.ProcessGroup | None, sends_of: Callable[[int], Sequence[Move]]
    ) -> bool:
        """Make and map the memory; every rank of the group calls it.

        Args:
            group: the ranks of the plan, and possibly more; all ranks of the job if None.
            sends_of: what a rank sends to all others; it says where a slice lies in its ring.

        Returns:
            Whether all ranks could do so. They cannot if they are on several machines or if there
            is no room in shared memory.
        """
        name = f"mrlhf-{uuid.uuid4().hex}"
        own_ring = DIRECTORY / f"{name}.ring"
        own_inbox = DIRECTORY / f"{name}.inbox"
        world = group or dist.group.WORLD
        assert world is not None
        ranks = dist.get_process_group_ranks(world)

        try:
            made = self._make(own_ring, own_inbox)
            names = all_gather_objects(name if made else None, world)

            opened = False
            if None not in names:
                stems = {
                    rank: DIRECTORY / str(name) for rank, name in zip(ranks, names, strict=True)
                }
                opened = self._open_others(stems, sends_of)
            return all(all_gather_objects(opened, world))
        finally:
            for file in (own_ring, own_inbox):
                with suppress(OSError):  # it was not made, and where it would be is read-only
                    file.unlink()

    def carry(self, source: Views, target: Views, work: Iterator[None]) -> int:
        """Make all moves; every rank of the group calls it.

        Args:
            source: the slices that this rank sends.
            target: the slices that it receives.
            work: run to its end, one step whenever there is nothing to pack or to unpack.

        Returns:
            Bytes received.

        Raises:
            WeightError: another rank does not call it in time, or has ended.
        """
        self._run += 1
        parcels = self._own.parcels if self._own is not None else ()
        waiting_readers = [set(parcel.readers) for parcel in parcels]
        unread = {sender: self._parcels_for_me(ring) for sender, ring in self._read_from.items()}

        packed = 0
        received_bytes = 0
        has_work = True
        while packed < len(parcels) or any(unread.values()) or any(waiting_readers):
            if packed < len(parcels):
                is_place_free = packed < RING_PARCELS or not waiting_readers[packed - RING_PARCELS]
                if is_place_free:
                    self._pack(packed, source)
                    packed += 1
                    continue

            messages = self._receive(0.0 if has_work else self._timeout_s)
            if not messages and has_work:
                has_work = next(work, _NO_MORE_WORK) is not _NO_MORE_WORK
            elif not messages:
                missing = {sender for sender, numbers in unread.items() if numbers}
                raise self._timed_out(missing.union(*waiting_readers))

            for _, peer, number, kind in messages:
                if kind == _READ:
                    waiting_readers[number].remove(peer)
                else:
                    received_bytes += self._unpack(peer, number, target)
                    unread[peer].remove(number)

        for _ in work:
            pass
        return received_bytes

    def _ring_of(self, moves: Sequence[Move]) -> Ring:
        return Ring(parcels_of(moves, self._capacity), self._dtype)

    def _make(self, own_ring: Path, own_inbox: Path) -> bool:
        """Make the inbox and the ring of this rank; False if this machine cannot."""
        if not (hasattr(os, "posix_fallocate") and hasattr(os, "mkfifo")):
            return False
        try:
            self._mailbox = Mailbox(own_inbox)
            if self._own is not None:
                self._own.open(own_ring, create=True)
        except OSError:  # there is no room, or the file system has no named pipes
            return False
        return True

    def _open_others(
        self, stems: dict[int, Path], sends_of: Callable[[int], Sequence[Move]]
    ) -> bool:
        """Open the inboxes and rings of others; False if one of them is on another machine."""
        peers = set(self._senders)
        if self._own is not None:
            for parcel in self._own.parcels:
                peers.update(parcel.readers)

        try:
            self._mailbox.open_peers({rank: stems[rank].with_suffix(".inbox") for rank in peers})
            for sender in self._senders:
                ring = self._ring_of(sends_of(sender))
                ring.open(stems[sender].with_suffix(".ring"), create=False)
                self._read_from[sender] = ring
        except OSError:
            return False
        return True

    def _parcels_for_me(self, ring: Ring) -> set[int]:
        return {
            number for number, parcel in enumerate(ring.parcels) if self._rank in parcel.readers
        }

    def _pack(self, number: int, source: Views) -> None:
        assert self._own is not None
        parcel = self._own.parcels[number]
        for packed, flat in zip(parcel.slices, self._own.slices(number), strict=True):
            move = packed.moves[0]
            view = source(move.source, move.start, move.stop)
            flat.view(view.shape).copy_(view)

        for reader in parcel.readers:
            self._mailbox.send(reader, (self._run, self._rank, number, _FILLED))

    def _unpack(self, sender: int, number: int, target: Views) -> int:
        ring = self._read_from[sender]
        received_bytes = 0
        for packed, flat in zip(ring.parcels[number].slices, ring.slices(number), strict=True):
            for move in packed.moves:
                if move.target_rank == self._rank:
                    view = target(move.target, move.start, move.stop)
                    view.copy_(flat.view(view.shape))
                    received_bytes += flat.nbytes

        self._mailbox.send(sender, (self._run, self._rank, number, _READ))
        return received_bytes

    def _receive(self, timeout_s: float) -> list[Message]:
        """Messages of this run, or none if the time is up.

        Other ranks may have started the next run; their messages are kept for it.
        """
        arrived = self._messages_of_next_run
        self._messages_of_next_run = []
        while True:
            of_this_run: list[Message] = []
            for message in arrived:
                if message[0] == self._run:
                    of_this_run.append(message)
                else:
                    self._messages_of_next_run.append(message)
            if of_this_run:
                return of_this_run

            arrived = self._mailbox.receive(timeout_s)
            if not arrived:
                return []

    def _timed_out(self, ranks: set[int]) -> WeightError:
        return WeightError(
            f"rank {self._rank} waited {self._timeout_s:g} s for ranks {sorted(ranks)} to move "
            "weights; check what these ranks do, or raise distributed.timeout_s"
        )
