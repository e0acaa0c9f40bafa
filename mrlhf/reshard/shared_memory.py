"""Carries moves between ranks of one machine through memory that they share.

Each rank packs what it sends into a small ring of chunks in POSIX shared memory, once for all who
need it, and they unpack it from there straight into their engines. Packing and unpacking overlap,
nothing is copied in between, and chunks that fit into the processor's cache cost little more than
copying each number once. The names of the memory are gone before the first weight moves, so a job
that is killed later leaves nothing behind. The ring is kept between runs: to take its pages anew
each time costs as long as moving several times its size.

It knows moves and views; it does not know plans or engines.
"""

from __future__ import annotations

import io
import mmap
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.reshard.chunks import Chunk, chunks_of
from mrlhf.reshard.mailbox import Mailbox, Message
from mrlhf.reshard.plan import Move
from mrlhf.reshard.views import Views

DIRECTORY = Path("/dev/shm")
RING_BYTES = 8 << 20
RING_CHUNKS = 4
_FILLED, _READ = 0, 1
_ALL_DONE = object()


class Ring:
    """The chunks of one sending rank, as they lie in shared memory: chunk n in place n modulo
    `RING_CHUNKS`.
    """

    def __init__(self, chunks: Sequence[Chunk], dtype: torch.dtype) -> None:
        self.chunks, self._dtype = chunks, dtype
        self._stride = max((chunk.elements for chunk in chunks), default=0)
        self.nbytes = self._stride * min(RING_CHUNKS, len(chunks)) * dtype.itemsize

    def open(self, path: Path, create: bool) -> None:
        """Map the file at `path`; the owner creates it.

        Raises:
            OSError: there is no such file on this machine, or no room for it.
        """
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        with io.FileIO(os.open(path, flags, 0o600), "r+") as file:
            if create:
                # Without its pages taken at once, a full /dev/shm would kill the process that
                # writes to it later.
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
            numbers = torch.frombuffer(mmap.mmap(file.fileno(), self.nbytes), dtype=self._dtype)
        places = [number % RING_CHUNKS * self._stride for number in range(len(self.chunks))]
        self._parcels = [
            [numbers[place + parcel.offset :][: parcel.elements] for parcel in chunk.parcels]
            for place, chunk in zip(places, self.chunks, strict=True)
        ]

    def parcels(self, number: int) -> list[Tensor]:
        """The parcels of a chunk, flat."""
        return self._parcels[number]


class SharedRings:
    """This rank's ring, the rings that it reads, and the messages by which ranks tell what is
    filled and what is read.

    Nobody leaves `carry` before all have read what it sent.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        rank: int,
        bucket_bytes: int,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        """Every rank constructs one, from the same moves, and calls `open`.

        Args:
            moves: of all ranks.
            rank: global rank of this process.
            bucket_bytes: bound on the memory of a ring, unless a few rows of a tensor are larger.
            dtype: of the numbers.
            timeout_s: seconds after which a rank that waits for another gives up.
        """
        self._rank, self._timeout_s = rank, timeout_s
        capacity = min(bucket_bytes, RING_BYTES) // RING_CHUNKS // dtype.itemsize
        by_sender: dict[int, list[Move]] = {}
        for move in moves:
            by_sender.setdefault(move.source_rank, []).append(move)
        rings = {
            sender: Ring(chunks_of(part, capacity), dtype) for sender, part in by_sender.items()
        }
        self._own = rings.get(rank)
        self._read_from = {
            sender: ring
            for sender, ring in rings.items()
            if sender != rank and any(rank in chunk.readers for chunk in ring.chunks)
        }
        self.peak_bytes = 0 if self._own is None else self._own.nbytes
        self._run = 0
        self._early: list[Message] = []

    def open(self, group: dist.ProcessGroup | None) -> bool:
        """Make and map the memory; every rank of the group calls it.

        Returns:
            Whether all of them could: they are on one machine, and it has room in shared memory.
        """
        name = f"mrlhf-{uuid.uuid4().hex}"
        own_ring, own_inbox = DIRECTORY / f"{name}.ring", DIRECTORY / f"{name}.inbox"
        world = group or dist.group.WORLD
        assert world is not None
        ranks = dist.get_process_group_ranks(world)
        try:
            made = self._make(own_ring, own_inbox)
            names = dict(zip(ranks, all_gather_objects(name if made else None, world), strict=True))
            opened = None not in names.values() and self._open_others(
                {r: DIRECTORY / str(n) for r, n in names.items()}
            )
            return all(all_gather_objects(opened, world))
        finally:
            own_ring.unlink(missing_ok=True)
            own_inbox.unlink(missing_ok=True)

    def carry(self, source: Views, target: Views, work: Iterator[None]) -> int:
        """Move what is to be moved; every rank of the group calls it.

        Args:
            source: the slices that this rank sends.
            target: the slices that it receives.
            work: done to its end, a step at a time, whenever there is nothing to pack or to unpack.

        Returns:
            Bytes received.

        Raises:
            WeightError: a rank does not come, or has ended.
        """
        self._run += 1
        chunks = self._own.chunks if self._own is not None else ()
        unread = {sender: self._chunks_for_me(ring) for sender, ring in self._read_from.items()}
        readers = [set(chunk.readers) for chunk in chunks]
        packed, moved, working = 0, 0, True
        while packed < len(chunks) or any(unread.values()) or any(readers):
            if packed < len(chunks) and (packed < RING_CHUNKS or not readers[packed - RING_CHUNKS]):
                self._pack(packed, source)
                packed += 1
                continue
            messages = self._receive(0.0 if working else self._timeout_s)
            if not messages and not working:
                raise self._left_alone(
                    {rank for rank, numbers in unread.items() if numbers}.union(*readers)
                )
            working = working and (bool(messages) or next(work, _ALL_DONE) is not _ALL_DONE)
            for _, peer, number, kind in messages:
                if kind == _READ:
                    readers[number].remove(peer)
                else:
                    moved += self._unpack(peer, number, target)
                    unread[peer].remove(number)
        for _ in work:
            pass
        return moved

    def _make(self, own_ring: Path, own_inbox: Path) -> bool:
        if not (
            hasattr(os, "posix_fallocate") and hasattr(os, "mkfifo")
        ):  # not every system has them
            return False
        try:
            self._mailbox = Mailbox(own_inbox)
            if self._own is not None:
                self._own.open(own_ring, create=True)
        except OSError:  # no room, or a system without named pipes
            return False
        return True

    def _open_others(self, stems: dict[int, Path]) -> bool:
        writes_to = {
            reader for chunk in (self._own.chunks if self._own else ()) for reader in chunk.readers
        }
        try:
            peers = writes_to | set(self._read_from)
            self._mailbox.open_peers({rank: stems[rank].with_suffix(".inbox") for rank in peers})
            for sender, ring in self._read_from.items():
                ring.open(stems[sender].with_suffix(".ring"), create=False)
        except OSError:
            return False
        return True

    def _chunks_for_me(self, ring: Ring) -> set[int]:
        return {number for number, chunk in enumerate(ring.chunks) if self._rank in chunk.readers}

    def _pack(self, number: int, source: Views) -> None:
        assert self._own is not None
        chunk = self._own.chunks[number]
        for parcel, flat in zip(chunk.parcels, self._own.parcels(number), strict=True):
            move = parcel.moves[0]
            view = source(move.source, move.start, move.stop)
            flat.view(view.shape).copy_(view)
        for reader in chunk.readers:
            self._mailbox.send(reader, (self._run, self._rank, number, _FILLED))

    def _unpack(self, sender: int, number: int, target: Views) -> int:
        ring, moved = self._read_from[sender], 0
        for parcel, flat in zip(ring.chunks[number].parcels, ring.parcels(number), strict=True):
            for move in parcel.moves:
                if move.target_rank == self._rank:
                    view = target(move.target, move.start, move.stop)
                    view.copy_(flat.view(view.shape))
                    moved += flat.nbytes
        self._mailbox.send(sender, (self._run, self._rank, number, _READ))
        return moved

    def _receive(self, timeout_s: float) -> list[Message]:
        """Messages of this run, none if the time is up; those of the next, which some have begun,
        are kept for it.
        """
        arrived = self._early
        self._early = []
        while True:
            found = [message for message in arrived if message[0] == self._run]
            self._early += [message for message in arrived if message[0] != self._run]
            if found:
                return found
            arrived = self._mailbox.receive(timeout_s)
            if not arrived:
                return []

    def _left_alone(self, ranks: set[int]) -> WeightError:
        return WeightError(
            f"rank {self._rank} waited {self._timeout_s:g} s for ranks {sorted(ranks)} to move weights; "
            f"look at what those do, or raise distributed.timeout_s"
        )
