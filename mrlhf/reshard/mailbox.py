"""Short messages between processes of one machine: a named pipe each, which all others write to.

Sending never blocks and receiving blocks in the kernel, so processes that are more than the cores
do not take them from each other. It does not know what the messages mean.
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
_LONGEST_WAIT = 2**31 - 1  # milliseconds: poll counts in 32 bits
_MOST_BYTES = 4096 * _FORMAT.size


class Mailbox:
    """One process's inbox, and the way into others'."""

    def __init__(self, path: Path) -> None:
        """Make the inbox at `path`, which must not exist and may be unlinked once all who write
        have opened it.

        Raises:
            OSError: there can be no named pipe.
        """
        os.mkfifo(path, 0o600)
        # Opened for writing too, an inbox that nobody else has opened is empty and not at its end.
        self._inbox = io.FileIO(os.open(path, os.O_RDWR | os.O_NONBLOCK), "r")
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self._peers: dict[int, io.FileIO] = {}

    def open_peers(self, paths: Mapping[int, Path]) -> None:
        """Open the inboxes of others, by rank.

        Raises:
            OSError: one is not on this machine.
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
        """All messages that are there, in order of arrival; waits at most `timeout_s` seconds for
        the first.
        """
        if not self._poll.poll(min(timeout_s * 1000, _LONGEST_WAIT)):
            return []
        return list(_FORMAT.iter_unpack(self._inbox.read(_MOST_BYTES) or b""))
