"""The process of a user's reward function, as the trainer sees it: messages, limits, output, end.

Messages are lines of JSON, so that nothing that the user's code sends can run in the trainer. This
file does not know what a message means.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mrlhf.rewards.process_tree import descendants, kill_tree

__all__ = ["Limits", "TooManyProcesses", "WorkerProcess"]

_WORKER = Path(__file__).with_name("worker.py")
_OUTPUT_BYTES = 4000
_MAX_MESSAGE_BYTES = 64 * 2**20
_COUNT_EVERY_S = 0.5
_END_S = 5.0  # for a process that has closed its connection
# How a library ends a process that gets no memory.
_OUT_OF_MEMORY = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP)


@dataclass(frozen=True)
class Limits:
    """What a user's function may use.

    Attributes:
        timeout_s: longest time that one call may take, seconds.
        memory_mb: most private memory of each of its processes, MB (RLIMIT_DATA); None: no limit.
        max_processes: most processes at once, the first included; None: no limit. They are counted
            twice a second while a call runs.
    """

    timeout_s: float = 60.0
    memory_mb: int | None = None
    max_processes: int | None = None

    @property
    def hint(self) -> str:
        """Names the limit on memory."""
        return f"reward.memory_mb = {self.memory_mb} limits its memory"


class TooManyProcesses(Exception):
    """The function has more processes than it may; the message says how many."""


class WorkerProcess:
    """A running worker."""

    def __init__(self, file: Path, name: str, limits: Limits) -> None:
        """Start the process, which waits for its first message."""
        self._limits = limits
        self._received = bytearray()
        self._counted = time.monotonic()
        self._socket, theirs = socket.socketpair()
        # Appending, so that the two processes need not agree on a position.
        self._output: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (closed in stop)

        memory_mb = str(limits.memory_mb or 0)
        # Its other end closes when this process ends, however it ends; the kernel tells the worker.
        lifeline, held = os.pipe()
        passed = [theirs.fileno(), lifeline]
        arguments = [*map(str, passed), str(file), name, str(limits.timeout_s), memory_mb]
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-u", str(_WORKER), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                start_new_session=True,
            )
        os.close(lifeline)
        self._end = weakref.finalize(self, _end, self._popen, self._socket, held)

    def send(self, message: Iterable[Any]) -> None:
        """Send a list; a value in it that JSON does not have arrives as text.

        If the worker is gone or does not read, the reader of its answer reports that.
        """
        line = json.dumps(list(message), default=str).encode() + b"\n"
        self._socket.settimeout(self._limits.timeout_s)
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self._socket.sendall(line)

    def receive(self, timeout_s: float) -> Any:
        """The next message.

        Raises:
            TimeoutError: it does not come in time.
            EOFError, ConnectionResetError: the process has ended.
            TooManyProcesses: the function has started too many.
            ValueError: the message is not JSON, or endless.
        """
        limit = time.monotonic() + timeout_s
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message has more than {_MAX_MESSAGE_BYTES} bytes")
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError

            self._socket.settimeout(min(left, _COUNT_EVERY_S))
            with suppress(TimeoutError):
                chunk = self._socket.recv(2**20)
                if not chunk:
                    raise EOFError
                self._received += chunk
            self._count_processes()

        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            return json.loads(line, parse_int=float)
        except RecursionError:
            raise ValueError("a message is nested too deeply") from None

    def drain(self) -> str:
        """The last part of what was printed since the previous call, on one line."""
        descriptor = self._output.fileno()
        start = max(0, os.fstat(descriptor).st_size - _OUTPUT_BYTES)
        printed = os.pread(descriptor, _OUTPUT_BYTES, start).decode(errors="replace")

        os.ftruncate(descriptor, 0)
        return " | ".join(printed.split("\n")).strip(" |")

    def stop(self) -> str:
        """Kill the process and all that it started; returns what it printed last."""
        self._end()
        printed = self.drain()
        self._output.close()
        return printed

    def ending(self) -> str:
        """How the process ended by itself, and which limit may be why; call it before `stop`."""
        try:
            code = self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection to the trainer, and was stopped"
        if code >= 0:
            return f"ended its process (exit code {code})"

        which = signal.Signals(-code)
        hint = ""
        if which == signal.SIGKILL:
            hint = ", which the kernel sends when memory runs out"
        elif which in _OUT_OF_MEMORY and self._limits.memory_mb is not None:
            hint = f"; {self._limits.hint}"
        return f"ended its process (signal {which.name}{hint})"

    def _count_processes(self) -> None:
        most = self._limits.max_processes
        if most is None or time.monotonic() - self._counted < _COUNT_EVERY_S:
            return
        count = 1 + len(descendants(self._popen.pid))
        self._counted = time.monotonic()
        if count > most:
            raise TooManyProcesses(f"had {count} processes, more than {most}")


def _end(popen: subprocess.Popen[bytes], connection: socket.socket, lifeline: int) -> None:
    # The process ends by itself when it sees one of them closed, and orphans that it has adopted
    # would then belong to nobody.
    kill_tree(popen.pid)
    popen.wait()
    connection.close()
    os.close(lifeline)
