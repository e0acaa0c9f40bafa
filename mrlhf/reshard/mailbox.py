"""Short messages between the processes of one machine, over named pipes.

Each process reads its own pipe, and the others write to it. Sending never blocks, and receiving
waits in the kernel, so a waiting process takes no core from the others. This file does not know
what the messages mean.
"""

from __future__ import annotations

import io
import os
import select
import struct
from collections.abc import Mapping
from pathlib import Path

from mrlhf.errors import WeightError

Message = tuple[int, int, int, int]
_FORMAT = struct.Struct("<iiii")
_LONGEST_WAIT_MS = 2**31 - 1  # poll counts milliseconds in 32 bits
_MOST_BYTES = 4096 * _FORMAT.size


class Mailbox:
    """The inbox of one process, and its access to the inboxes of others."""

    def __init__(self, path: Path) -> None:
        """Make the inbox.

        Args:
            path: must not exist yet, and may be unlinked once all who write have opened it.

        Raises:
            OSError: a named pipe cannot be made there.
        """
        os.mkfifo(path, 0o600)
        # It is opened for writing too: otherwise a read would report the end of the file while no
        # other process has opened it.
        self._inbox = io.FileIO(os.open(path, os.O_RDWR | os.O_NONBLOCK), "r")
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self._peers: dict[int, io.FileIO] = {}

    def open_peers(self, paths: Mapping[int, Path]) -> None:
        """Open the inboxes of others, by rank.

        Raises:
            OSError: an inbox is not on this machine.
        """
        for rank, path in paths.items():
            self._peers[rank] = io.FileIO(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w")

    def send(self, rank: int, message: Message) -> None:
        """Put four 32-bit numbers into the inbox of `rank`.

        Raises:
            WeightError: that process has ended.
        """
        try:
            written = self._peers[rank].write(_FORMAT.pack(*message))
        except BrokenPipeError as error:
            raise WeightError(
                f"rank {rank} ended while weights were moved; its own error says why"
            ) from error
        assert written == _FORMAT.size, "the inbox is full: a pipe holds 4096 messages"

    def receive(self, timeout_s: float) -> list[Message]:
        """The messages that have arrived, in order; wait at most `timeout_s` for the first one."""
        if not self._poll.poll(min(timeout_s * 1000, _LONGEST_WAIT_MS)):
            return []
        return list(_FORMAT.iter_unpack(self._inbox.read(_MOST_BYTES) or b""))
