"""A process that runs a user's code, from the trainer's side: messages, output and its end.

Messages are lines of JSON. This file does not know what a message means.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_OUTPUT_BYTES = 4000
_END_S = 5.0  # for a process that has closed its connection
# The signals by which libraries end a process that gets no memory.
_OUT_OF_MEMORY = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP)


@dataclass(frozen=True)
class Limits:
    """The time and memory that a user's code may use."""

    timeout_s: float = 60.0  # longest time of one call, seconds
    # most private memory of each of its processes, MB (RLIMIT_DATA); None: no limit
    memory_mb: int | None = None
    key: str = "reward.memory_mb"  # that sets it

    @property
    def hint(self) -> str:
        """The advice in the error of a function that had too little memory."""
        return f"{self.key} = {self.memory_mb} limits its memory"


class WorkerProcess:
    """A running worker."""

    def __init__(self, script: Path, arguments: Sequence[str], limits: Limits) -> None:
        """Start the process, which waits for its first message.

        The script gets a socket and a lifeline, as numbers of descriptors, then `arguments` and the
        most memory in MB, 0 if there is no limit.
        """
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        # Appending, so that the two processes need not agree on a position.
        self._output: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (closed in stop)

        # Its other end closes when this process ends, however it ends; the kernel tells the worker.
        lifeline, held = os.pipe()
        passed = [theirs.fileno(), lifeline]
        every = [*map(str, passed), *arguments, str(limits.memory_mb or 0)]
        with theirs:
            # Its own group, so that what the function starts can be killed with it.
            self._popen = subprocess.Popen(
                [sys.executable, "-u", str(script), *every],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                start_new_session=True,
            )
        os.close(lifeline)
        self._end = weakref.finalize(self, _end, self._popen, self._socket, held)

    def send(self, message: Iterable[Any]) -> None:
        """Send a list; values that JSON does not have arrive as text.

        If the worker is gone or does not read, `receive` reports that.
        """
        self.send_object(list(message))

    def send_object(self, message: Any) -> None:
        """Send a list or a dictionary, as `send` does."""
        self._socket.settimeout(self._limits.timeout_s)
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self._socket.sendall(json.dumps(message, default=str).encode() + b"\n")

    def send_with(self, message: Iterable[Any], descriptor: int) -> None:
        """Send a short list, and with it a descriptor, which the process gets as its own."""
        self._socket.settimeout(self._limits.timeout_s)
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            socket.send_fds(
                self._socket, [json.dumps(list(message)).encode() + b"\n"], [descriptor]
            )

    def receive(self, timeout_s: float) -> Any:
        """The next message.

        Raises:
            TimeoutError: it does not come in time; the caller must then stop the process.
            EOFError, ConnectionResetError: the process has ended.
        """
        self._socket.settimeout(timeout_s)
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def drain(self) -> str:
        """The end of what was printed since the previous call, on one line."""
        descriptor = self._output.fileno()
        start = max(0, os.fstat(descriptor).st_size - _OUTPUT_BYTES)
        printed = os.pread(descriptor, _OUTPUT_BYTES, start).decode(errors="replace")
        os.ftruncate(descriptor, 0)
        return " | ".join(printed.split("\n")).strip(" |")

    def stop(self) -> str:
        """Kill the process and its group; returns what it printed last."""
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


def _end(popen: subprocess.Popen[bytes], connection: socket.socket, lifeline: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)  # also if the worker has ended: others may be left
    popen.wait()
    connection.close()
    os.close(lifeline)
